#!/usr/bin/env bash
# `atom ab-compare` as a CI job calls it for a pull request: the exit status decides, JUnit and the step summary say why.
#
#   REPO=DIR RECIPE=FILE RECORDS=DIR ab_compare_ci.sh CASE
#
# `atom` is on PATH. REPO is a git repository with the refs main, comment, slower and absent. RECORDS has results of
# `vllm bench serve` of main, same, slower, noisy and failing, six each (main/1.json, …): with those the gates are
# tried, because what they measured does not depend on this machine. Prints `CASE: ok`, or what is wrong, and then ends
# with 1.
set -u

load="random --random-input-len 8 --random-output-len 12 --max-concurrency 4 --num-prompts 80"

fail() {
    echo "$case: $*"
    exit 1
}

# What a job would have in its workflow file.
compare() { # BASE HEAD [OPTIONS…]
    GITHUB_STEP_SUMMARY=summary.md atom ab-compare "$@" --junit ab.xml --json ab.json --output-dir run
}

refs() { # HEAD [OPTIONS…]
    compare main "$@" --repo "$REPO" --recipe "$RECIPE" --load "$load" --pairs 1 --no-swap
}

recorded() { # HEAD [OPTIONS…]
    local head=$1
    shift
    compare "main=run:$(results main)" "$head=run:$(results "$head")" --fail-if-slower 2% "$@"
}

results() { # ARM
    printf '%s,' "$RECORDS/$1"/*.json | sed 's/,$//'
}

expect() { # STATUS COMMAND…
    local wanted=$1
    shift
    "$@" > out 2> err
    local status=$?
    [ "$status" -eq "$wanted" ] || fail "ended with $status, not $wanted: $(cat err out)"
    if grep -q Traceback err; then fail "$(cat err)"; fi
}

has() { # FILE TEXT
    grep -q -e "$2" "$1" || fail "$1 has no \"$2\": $(cat "$1")"
}

# No server, no client and no checkout in use: the label finds nothing to sweep.
nothing_left() {
    atom clean --dry-run > left 2>&1 || fail "$(cat left)"
    if grep -q "$RECIPE\|smallserve" left; then fail "left behind: $(cat left)"; fi
    [ -z "$(git -C "$REPO" status --porcelain)" ] || fail "the user's checkout was changed"
    [ "$(git -C "$REPO" worktree list | wc -l)" -eq 1 ] || fail "a worktree is left"
}

# ---- gates, on what was recorded

case_pass() {
    expect 0 recorded same
    has ab.xml 'failures="0" errors="0"'
    has summary.md "main"
    has ab.json '"valid": true'
}

case_regression() {
    expect 3 recorded slower
    has ab.xml "<failure"
    has summary.md "slower is slower than main by \(9\|10\)\."
    expect 3 atom report run --quiet
}

case_undecided() {
    expect 4 recorded noisy
    has ab.xml "<error"
    has out "UNDECIDED"
    expect 0 recorded_again noisy
}

# The same without a gate: nobody asked, so nothing is undecided.
recorded_again() {
    atom ab-compare "main=run:$(results main)" "$1=run:$(results "$1")" --output-dir again
}

case_censored() {
    expect 4 recorded failing
    has ab.xml "<error"
    has summary.md "censored"
    if grep -q '"word": "faster"' ab.json; then fail "a censored arm wins"; fi
}

# ---- refs of a server that is not ours

case_plan() {
    expect 0 refs slower --dry-run
    has out "main"
    has out "slower"
    [ ! -e run ] || fail "a plan that is only shown left a directory"
}

# 4 where this machine was too busy to measure, which is then said.
case_refs() {
    refs slower > out 2> err
    local status=$?
    [ "$status" -eq 0 ] || { [ "$status" -eq 4 ] && grep -q "client saturated" out; } || fail "$status: $(cat err out)"
    has summary.md "indicative: slower"
    nothing_left
}

case_absent() {
    expect 1 refs absent
    has summary.md "out of luck"
    has ab.xml "<error"
    [ -s run/report.html ] || fail "no page"
    nothing_left
}

case_usage() {
    expect 2 refs no-such-ref
    [ "$(wc -l < err)" -eq 1 ] || fail "not one line: $(cat err)"
    has err "no-such-ref"
    [ ! -e run ] || fail "a directory is left of a comparison that never was"
}

# Ctrl-C in the middle, then on with it.
case_resume() {
    GITHUB_STEP_SUMMARY=summary.md atom ab-compare main comment --repo "$REPO" --recipe "$RECIPE" --load "$load" \
        --pairs 1 --no-swap --output-dir run > out 2> err &
    local pid=$!
    until ls run/arms/*/run-1/requests/*.jsonl > /dev/null 2>&1; do
        kill -0 "$pid" 2> /dev/null || fail "it ended by itself: $(cat err)"
        sleep 0.05
    done
    kill -s INT "$pid"
    wait "$pid"
    local status=$?
    [ "$status" -eq 130 ] || fail "ended with $status, not 130: $(cat err)"
    nothing_left
    atom ab-compare --resume run --json ab.json > out 2> err
    status=$?
    [ "$status" -eq 0 ] || { [ "$status" -eq 4 ] && grep -q "client saturated" out; } || fail "$status: $(cat err out)"
    has ab.json '"complete": true'
}

case=$1
cd "$(mktemp -d "${TMPDIR:-/tmp}/$case.XXXXXX")" || exit 1
"case_$case"
echo "$case: ok"
