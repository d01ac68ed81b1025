/* Records when each rank of an MPI program enters and leaves its blocking collectives; the program itself is not
 * changed. Build with the program's own mpicc and preload it (atom trace-consensus recorder --build DIR does both):
 *
 *     mpicc -O2 -fPIC -shared -pthread recorder.c -o libatom_pmpi.so
 *     mpiexec -n 4 env LD_PRELOAD=$PWD/libatom_pmpi.so ATOM_PMPI_DIR=trace ./program
 *
 * Each rank writes ATOM_PMPI_DIR/rank-N.pmpi: a header and records of 32 bytes, in the byte order of the machine. The
 * file is mapped, so that all of it is there after a kill, with the call that a rank hangs in. When it has grown to
 * ATOM_PMPI_MAX_MB (256) further calls are counted alone. Nothing that goes wrong here disturbs the program.
 * diag/consensus/pmpi_file.py reads it; the structures and the order of the kinds are the same there.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum kind {
    BARRIER, BCAST, REDUCE, ALLREDUCE, GATHER, GATHERV, SCATTER, SCATTERV, ALLGATHER, ALLGATHERV, ALLTOALL, ALLTOALLV,
    ALLTOALLW, REDUCE_SCATTER, REDUCE_SCATTER_BLOCK, SCAN, EXSCAN, KINDS
};
enum { COMMUNICATOR = 0xffff, VERSION = 1, CHUNK = 1 << 21, NAME = 32, MOST_COMMUNICATORS = 1 << 16 };

struct header {
    char magic[8];
    uint32_t version, header_bytes, record_bytes, pid;
    int32_t rank, size;
    uint64_t start_ns, end_ns;      /* end_ns 0: never came to MPI_Finalize */
    uint64_t dropped, nonblocking;  /* calls that are not recorded: no room; non-blocking collectives */
    uint64_t cpu_ns;                /* of the process, at the end */
    char host[64], boot_id[40], reserved[80];
};

struct record {
    uint64_t enter_ns, exit_ns; /* exit_ns 0: still inside. Of a COMMUNICATOR: hash of its members, its instance */
    uint32_t number;            /* of the call among those of its communicator; its size */
    uint32_t communicator;      /* the rank's own number for it */
    uint16_t kind, reserved;    /* a COMMUNICATOR is followed by one record with its name */
    uint32_t spare;
};

_Static_assert(sizeof(struct header) == 256 && sizeof(struct record) == 32, "the reader expects these sizes");

struct communicator {
    uint64_t members, instance;
    uint32_t id, calls;
    struct communicator *older;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static enum { UNTRIED, ON, OFF } state = UNTRIED;
static int file = -1, keyval = MPI_KEYVAL_INVALID;
static struct header *header;
static char *chunk;
static size_t chunk_at, used, most_bytes;
static struct communicator *newest;
static uint32_t communicators;

static uint64_t now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Space is reserved before it is mapped: a write to a mapping that the disk has no room for would kill the program. */
static char *map_chunk(void)
{
    if (chunk_at + CHUNK > most_bytes || posix_fallocate(file, (off_t)chunk_at, CHUNK) != 0)
        return NULL;
    char *mapped = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)chunk_at);
    if (mapped == MAP_FAILED)
        return NULL;
    chunk_at += CHUNK;
    return mapped;
}

static struct record *next_record(void)
{
    if (used + sizeof(struct record) > CHUNK) {
        char *mapped = map_chunk();
        if (!mapped)
            return NULL;
        chunk = mapped; /* the one before stays mapped: a call of another thread may still be in it */
        used = 0;
    }
    struct record *record = (struct record *)(chunk + used);
    used += sizeof *record;
    return record;
}

static void read_boot_id(char *text, size_t size)
{
    int source = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (source < 0)
        return;
    ssize_t got = read(source, text, size - 1);
    if (got > 0)
        text[strcspn(text, "\n")] = 0;
    close(source);
}

static void start(void)
{
    int ready = 0;
    PMPI_Initialized(&ready);
    if (!ready)
        return;
    state = OFF;
    int rank, size;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    PMPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *folder = getenv("ATOM_PMPI_DIR"), *most = getenv("ATOM_PMPI_MAX_MB");
    if (!folder || !*folder) {
        if (rank == 0)
            fprintf(stderr, "libatom_pmpi: ATOM_PMPI_DIR is not set: nothing is recorded\n");
        return;
    }
    unsigned long megabytes = most ? strtoul(most, NULL, 10) : 256;
    most_bytes = (size_t)(megabytes ? megabytes : 1) << 20;
    if (most_bytes < CHUNK)
        most_bytes = CHUNK;
    char path[4096];
    if (snprintf(path, sizeof path, "%s/rank-%d.pmpi", folder, rank) >= (int)sizeof path)
        return;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        fprintf(stderr, "libatom_pmpi: %s: %s\n", folder, strerror(errno));
    file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0 || !(chunk = map_chunk())) {
        fprintf(stderr, "libatom_pmpi: %s: %s: rank %d is not recorded\n", path, strerror(errno), rank);
        return;
    }
    PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &keyval, NULL);
    header = (struct header *)chunk;
    used = sizeof *header;
    header->version = VERSION;
    header->header_bytes = sizeof *header;
    header->record_bytes = sizeof(struct record);
    header->pid = (uint32_t)getpid();
    header->rank = rank;
    header->size = size;
    header->start_ns = now_ns(CLOCK_MONOTONIC);
    gethostname(header->host, sizeof header->host - 1);
    read_boot_id(header->boot_id, sizeof header->boot_id);
    memcpy(header->magic, "ATOMPMPI", 8);
    state = ON;
}

/* Members as a hash of their ranks in the world: the same on all of them, whatever each calls the communicator. */
static uint64_t hash_members(MPI_Comm comm, int *size)
{
    MPI_Group world, group;
    PMPI_Comm_size(comm, size);
    PMPI_Comm_group(MPI_COMM_WORLD, &world);
    PMPI_Comm_group(comm, &group);
    int *own = malloc(2 * (size_t)*size * sizeof *own), *global = own + *size;
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; own && i < *size; i++)
        own[i] = i;
    if (own && PMPI_Group_translate_ranks(group, *size, own, world, global) == MPI_SUCCESS)
        for (int i = 0; i < *size; i++)
            hash = (hash ^ (uint64_t)(uint32_t)global[i]) * 1099511628211u;
    free(own);
    PMPI_Group_free(&world);
    PMPI_Group_free(&group);
    return hash;
}

/* What is known of a communicator, kept with it, since a handle is used again when its communicator is freed. */
static struct communicator *look_up(MPI_Comm comm)
{
    int found = 0, inter = 0, size, length = 0;
    struct communicator *one = NULL;
    PMPI_Comm_get_attr(comm, keyval, &one, &found);
    if (found)
        return one;
    PMPI_Comm_test_inter(comm, &inter);
    if (inter || communicators == MOST_COMMUNICATORS || !(one = calloc(1, sizeof *one)))
        return NULL;
    one->members = hash_members(comm, &size);
    for (struct communicator *other = newest; other; other = other->older)
        one->instance += other->members == one->members;
    one->id = communicators++;
    one->older = newest;
    newest = one;
    PMPI_Comm_set_attr(comm, keyval, one);
    char name[MPI_MAX_OBJECT_NAME] = "";
    PMPI_Comm_get_name(comm, name, &length);
    struct record *said = next_record(), *named = said ? next_record() : NULL;
    if (named) {
        memcpy(named, name, strnlen(name, NAME - 1));
        said->enter_ns = one->members;
        said->exit_ns = one->instance;
        said->number = (uint32_t)size;
        said->communicator = one->id;
        said->kind = COMMUNICATOR;
    }
    return one;
}

static struct record *enter(enum kind kind, MPI_Comm comm)
{
    struct record *record = NULL;
    if (state == OFF || comm == MPI_COMM_NULL)
        return NULL;
    pthread_mutex_lock(&lock);
    if (state == UNTRIED)
        start();
    struct communicator *one = state == ON ? look_up(comm) : NULL;
    if (one) {
        uint32_t number = one->calls++;
        record = next_record();
        if (record) {
            record->number = number;
            record->communicator = one->id;
            record->kind = (uint16_t)kind;
            record->enter_ns = now_ns(CLOCK_MONOTONIC);
        }
    }
    if (state == ON && !record)
        header->dropped++;
    pthread_mutex_unlock(&lock);
    return record;
}

static void leave(struct record *record)
{
    if (record)
        record->exit_ns = now_ns(CLOCK_MONOTONIC);
}

static void begin(void)
{
    pthread_mutex_lock(&lock);
    if (state == UNTRIED)
        start();
    pthread_mutex_unlock(&lock);
}

int MPI_Init(int *argc, char ***argv)
{
    int code = PMPI_Init(argc, argv);
    begin();
    return code;
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided)
{
    int code = PMPI_Init_thread(argc, argv, required, provided);
    begin();
    return code;
}

int MPI_Finalize(void)
{
    pthread_mutex_lock(&lock);
    if (state == ON) {
        header->cpu_ns = now_ns(CLOCK_PROCESS_CPUTIME_ID);
        header->end_ns = now_ns(CLOCK_MONOTONIC);
    }
    state = OFF;
    pthread_mutex_unlock(&lock);
    return PMPI_Finalize();
}

#define COLLECTIVE(kind, name, parameters, arguments)   \
    int MPI_##name parameters                           \
    {                                                   \
        struct record *record = enter(kind, comm);      \
        int code = PMPI_##name arguments;               \
        leave(record);                                  \
        return code;                                    \
    }

/* Every collective, with C and D the types of a count and of a displacement. MPI 4 has each of them twice. */
#define COLLECTIVES(suffix, C, D)                                                                                      \
    COLLECTIVE(BCAST, Bcast##suffix, (void *b, C n, MPI_Datatype t, int root, MPI_Comm comm), (b, n, t, root, comm))   \
    COLLECTIVE(REDUCE, Reduce##suffix,                                                                                 \
               (const void *s, void *r, C n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm comm),                      \
               (s, r, n, t, op, root, comm))                                                                           \
    COLLECTIVE(ALLREDUCE, Allreduce##suffix,                                                                           \
               (const void *s, void *r, C n, MPI_Datatype t, MPI_Op op, MPI_Comm comm), (s, r, n, t, op, comm))        \
    COLLECTIVE(GATHER, Gather##suffix,                                                                                 \
               (const void *s, C n, MPI_Datatype t, void *r, C m, MPI_Datatype u, int root, MPI_Comm comm),            \
               (s, n, t, r, m, u, root, comm))                                                                         \
    COLLECTIVE(GATHERV, Gatherv##suffix,                                                                               \
               (const void *s, C n, MPI_Datatype t, void *r, const C m[], const D d[], MPI_Datatype u, int root,       \
                MPI_Comm comm),                                                                                        \
               (s, n, t, r, m, d, u, root, comm))                                                                      \
    COLLECTIVE(SCATTER, Scatter##suffix,                                                                               \
               (const void *s, C n, MPI_Datatype t, void *r, C m, MPI_Datatype u, int root, MPI_Comm comm),            \
               (s, n, t, r, m, u, root, comm))                                                                         \
    COLLECTIVE(SCATTERV, Scatterv##suffix,                                                                             \
               (const void *s, const C n[], const D d[], MPI_Datatype t, void *r, C m, MPI_Datatype u, int root,       \
                MPI_Comm comm),                                                                                        \
               (s, n, d, t, r, m, u, root, comm))                                                                      \
    COLLECTIVE(ALLGATHER, Allgather##suffix,                                                                           \
               (const void *s, C n, MPI_Datatype t, void *r, C m, MPI_Datatype u, MPI_Comm comm),                      \
               (s, n, t, r, m, u, comm))                                                                               \
    COLLECTIVE(ALLGATHERV, Allgatherv##suffix,                                                                         \
               (const void *s, C n, MPI_Datatype t, void *r, const C m[], const D d[], MPI_Datatype u, MPI_Comm comm), \
               (s, n, t, r, m, d, u, comm))                                                                            \
    COLLECTIVE(ALLTOALL, Alltoall##suffix,                                                                             \
               (const void *s, C n, MPI_Datatype t, void *r, C m, MPI_Datatype u, MPI_Comm comm),                      \
               (s, n, t, r, m, u, comm))                                                                               \
    COLLECTIVE(ALLTOALLV, Alltoallv##suffix,                                                                           \
               (const void *s, const C n[], const D d[], MPI_Datatype t, void *r, const C m[], const D e[],            \
                MPI_Datatype u, MPI_Comm comm),                                                                        \
               (s, n, d, t, r, m, e, u, comm))                                                                         \
    COLLECTIVE(ALLTOALLW, Alltoallw##suffix,                                                                           \
               (const void *s, const C n[], const D d[], const MPI_Datatype t[], void *r, const C m[], const D e[],    \
                const MPI_Datatype u[], MPI_Comm comm),                                                                \
               (s, n, d, t, r, m, e, u, comm))                                                                         \
    COLLECTIVE(REDUCE_SCATTER, Reduce_scatter##suffix,                                                                 \
               (const void *s, void *r, const C n[], MPI_Datatype t, MPI_Op op, MPI_Comm comm),                        \
               (s, r, n, t, op, comm))                                                                                 \
    COLLECTIVE(REDUCE_SCATTER_BLOCK, Reduce_scatter_block##suffix,                                                     \
               (const void *s, void *r, C n, MPI_Datatype t, MPI_Op op, MPI_Comm comm), (s, r, n, t, op, comm))        \
    COLLECTIVE(SCAN, Scan##suffix, (const void *s, void *r, C n, MPI_Datatype t, MPI_Op op, MPI_Comm comm),            \
               (s, r, n, t, op, comm))                                                                                 \
    COLLECTIVE(EXSCAN, Exscan##suffix, (const void *s, void *r, C n, MPI_Datatype t, MPI_Op op, MPI_Comm comm),        \
               (s, r, n, t, op, comm))

COLLECTIVE(BARRIER, Barrier, (MPI_Comm comm), (comm))
COLLECTIVES(, int, int)
#if MPI_VERSION >= 4
COLLECTIVES(_c, MPI_Count, MPI_Aint)
#endif

/* Of non-blocking collectives only that there are some: what a rank waits for in MPI_Wait may be anything. */
#define NONBLOCKING(name, parameters, arguments)        \
    int MPI_##name parameters                           \
    {                                                   \
        if (state == ON)                                \
            __atomic_fetch_add(&header->nonblocking, 1, __ATOMIC_RELAXED); \
        return PMPI_##name arguments;                   \
    }

#define NONBLOCKINGS(suffix, C, D)                                                                                     \
    NONBLOCKING(Ibcast##suffix, (void *b, C n, MPI_Datatype t, int root, MPI_Comm comm, MPI_Request *q),               \
                (b, n, t, root, comm, q))                                                                              \
    NONBLOCKING(Iallreduce##suffix,                                                                                    \
                (const void *s, void *r, C n, MPI_Datatype t, MPI_Op op, MPI_Comm comm, MPI_Request *q),               \
                (s, r, n, t, op, comm, q))                                                                             \
    NONBLOCKING(Iallgather##suffix,                                                                                    \
                (const void *s, C n, MPI_Datatype t, void *r, C m, MPI_Datatype u, MPI_Comm comm, MPI_Request *q),     \
                (s, n, t, r, m, u, comm, q))                                                                           \
    NONBLOCKING(Iallgatherv##suffix,                                                                                   \
                (const void *s, C n, MPI_Datatype t, void *r, const C m[], const D d[], MPI_Datatype u, MPI_Comm comm, \
                 MPI_Request *q),                                                                                      \
                (s, n, t, r, m, d, u, comm, q))                                                                        \
    NONBLOCKING(Ialltoall##suffix,                                                                                     \
                (const void *s, C n, MPI_Datatype t, void *r, C m, MPI_Datatype u, MPI_Comm comm, MPI_Request *q),     \
                (s, n, t, r, m, u, comm, q))

NONBLOCKING(Ibarrier, (MPI_Comm comm, MPI_Request *q), (comm, q))
NONBLOCKINGS(, int, int)
#if MPI_VERSION >= 4
NONBLOCKINGS(_c, MPI_Count, MPI_Aint)
#endif
