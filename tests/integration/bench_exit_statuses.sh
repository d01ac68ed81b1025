#!/usr/bin/env bash
# `atom bench` as a CI job calls it: the exit status decides, and what was measured has to be there afterwards.
#
#   GOOD=PORT ALL=PORT SOME=PORT bench_exit_statuses.sh CASE
#
# `atom` is on PATH. GOOD answers, ALL fails every request, SOME every third. Prints `CASE: ok`, or what is wrong, and
# then ends with 1.
set -u

load="--random-input-len 8 --random-output-len 4 --max-concurrency 4"
quick="$load --num-prompts 12 --quiet"
long="--random-input-len 8 --random-output-len 10 --max-concurrency 4 --num-prompts 5000"

fail() {
    echo "$case: $*"
    exit 1
}

expect() { # STATUS WHAT COMMAND…
    local wanted=$1 what=$2
    shift 2
    "$@" > "$what.out" 2> "$what.err"
    local status=$?
    [ "$status" -eq "$wanted" ] || fail "$what ended with $status, not $wanted: $(cat "$what.err")"
    if grep -q Traceback "$what.err"; then fail "$what: $(cat "$what.err")"; fi
}

wait_for_records() { # DIR PID
    until [ "$(cat "$1"/requests/*.jsonl 2> /dev/null | wc -l)" -ge 4 ]; do
        kill -0 "$2" 2> /dev/null || fail "the run ended by itself"
        sleep 0.05
    done
}

# What is left of a run that a signal ended: sealed, summed up, and readable with the other commands.
check_partial() { # DIR
    local completed
    completed=$(atom get "$1" completed)
    [ "$completed" -gt 0 ] && [ "$completed" -lt 5000 ] || fail "$completed of 5000 are completed"
    [ -s "$1/summary.json" ] && [ -s "$1/report.html" ] || fail "no summary.json or report.html"
    expect 4 report atom report "$1" --json report.json
    grep -q "INTERRUPTED: the load ended early" report.out || fail "the report does not say INTERRUPTED"
    grep -q '"completed"' report.json || fail "the report's JSON has no count"
}

end_by() { # SIGNAL STATUS
    atom bench random --port "$GOOD" $long --output-dir run --json run.json > run.out 2> run.err &
    local pid=$!
    wait_for_records run "$pid"
    kill -s "$1" "$pid"
    wait "$pid"
    local status=$?
    [ "$status" -eq "$2" ] || fail "ended with $status, not $2: $(cat run.err)"
    grep -q TTFT run.out || fail "no table of what was measured"
    grep -q '"validity": "interrupted"' run.json || fail "no JSON of what was measured"
    check_partial run
}

case_ok() {
    expect 0 bench atom bench random --port "$GOOD" $quick --output-dir run
    expect 0 report atom report run --quiet
    [ "$(atom get run completed)" = 12 ] || fail "not 12 are completed"
}

case_all_failed() {
    expect 1 bench atom bench random --port "$ALL" $quick --output-dir run --junit run.xml
    grep -q "all 12 requests failed" bench.err || fail "it does not say so: $(cat bench.err)"
    grep -q "<failure" run.xml || fail "JUnit passes"
    expect 1 report atom report run --quiet
}

case_nobody_listens() {
    expect 1 bench atom bench random --port 1 $quick --output-dir run
    [ "$(wc -l < bench.err)" -eq 1 ] || fail "not one line: $(cat bench.err)"
    [ ! -e run ] || fail "a directory is left of a run that never was"
}

case_threshold() {
    expect 4 bench atom bench random --port "$SOME" $quick --output-dir run
    grep -q -e "--failed-request-threshold" bench.err || fail "it does not name the flag: $(cat bench.err)"
    expect 4 report atom report run --quiet
    expect 0 lenient atom bench random --port "$SOME" $quick --output-dir lenient --failed-request-threshold 0.5
}

# A client that gets a sixth of the time: stopped for 100 ms again and again.
case_saturated() {
    atom bench random --port "$GOOD" --random-input-len 8 --random-output-len 20 --max-concurrency 4 \
        --num-prompts 80 --output-dir run --quiet > run.out 2> run.err &
    local pid=$!
    wait_for_records run "$pid"
    while kill -STOP "$pid" 2> /dev/null; do
        sleep 0.1
        kill -CONT "$pid" 2> /dev/null
        sleep 0.02
    done
    wait "$pid"
    local status=$?
    [ "$status" -eq 4 ] || fail "ended with $status, not 4: $(cat run.err)"
    grep -q "not valid: client saturated" run.err || fail "it does not say so: $(cat run.err)"
    expect 4 report atom report run
    grep -q "NOT VALID: client saturated" report.out || fail "the report does not say so"
    grep -q "80 completed" report.out || fail "what was measured is not there"
}

case_interrupted() { end_by INT 130; }
case_terminated() { end_by TERM 143; }

case_usage() {
    expect 2 flag atom bench random --port "$GOOD" $quick --no-such-flag
    expect 2 value atom bench random --port "$GOOD" $quick --num-prompts 0
    expect 2 command atom bench no-such-load
    expect 0 first atom bench random --port "$GOOD" $quick --output-dir run
    expect 2 taken atom bench random --port "$GOOD" $quick --output-dir run
    expect 2 nowhere atom report nowhere
}

# The same through the launcher of an MPI job: the status of the job is the one of the command.
case_ranks() {
    local ranks="mpiexec -n 2 atom bench random"
    expect 0 ok $ranks --port "$GOOD" $quick --output-dir ok
    [ "$(atom get ok completed)" = 12 ] || fail "not 12 are completed"
    expect 1 all $ranks --port "$ALL" $quick --output-dir all
    expect 4 some $ranks --port "$SOME" $quick --output-dir some
    expect 2 flag $ranks --port "$GOOD" $quick --no-such-flag
}

# Ctrl-C reaches the launcher, which hands it on.
case_ranks_interrupted() {
    mpiexec -n 2 atom bench random --port "$GOOD" $long --output-dir run > run.out 2> run.err &
    local pid=$!
    wait_for_records run "$pid"
    kill -s INT "$pid"
    wait "$pid"
    local status=$?
    [ "$status" -eq 130 ] || fail "ended with $status, not 130: $(cat run.err)"
    check_partial run
}

case=$1
cd "$(mktemp -d "${TMPDIR:-/tmp}/$case.XXXXXX")" || exit 1
"case_$case"
echo "$case: ok"
