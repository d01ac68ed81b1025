/* A program that knows nothing of the recorder: every rank sleeps 5 ms more than the one before and comes to a barrier.
 * Says when each rank entered and left, as text lines, to the file that it is given with the rank's number behind. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv)
{
    int rank, calls = argc > 2 ? atoi(argv[2]) : 0;
    char path[4096];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(path, sizeof path, "%s%d", argv[1], rank);
    FILE *said = fopen(path, "w");
    MPI_Barrier(MPI_COMM_WORLD);
    for (int call = 0; call < calls; call++) {
        struct timespec pause = {0, (rank + 1) * 5000000L};
        nanosleep(&pause, NULL);
        long long enter = now_ns();
        MPI_Barrier(MPI_COMM_WORLD);
        fprintf(said, "%lld %lld\n", enter, now_ns());
    }
    fclose(said);
    MPI_Finalize();
    return 0;
}
