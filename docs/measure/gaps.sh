#!/bin/bash
# One run of "batch fills the gaps" (docs/dispatch.md): four simulated workers, a front end, a trace whose
# speed follows a sine, and with the dispatcher batch requests of 512 prompt and 128 output tokens.
#
#     TRACE=mooncake-conversation.jsonl docs/measure/gaps.sh pair1-without without 1 21000
#     TRACE=mooncake-conversation.jsonl docs/measure/gaps.sh pair1-with    with    1 21000
#     docs/measure/gaps.py report gaps
#
# Arguments: a name, with or without, a seed, the first of 16 free ports. What is below is set by the
# environment. Leaves OUT/NAME: replay.json and replay.log, samples.jsonl, logs, metrics.
set -u
name=$1 arm=$2 seed=$3 port=$4
here=$(dirname "$(readlink -f "$0")")
BIN=${BIN:-bin/spillway} REDIS=${REDIS:-bin/tools/redis-server} TRACE=${TRACE:?is a Mooncake trace} OUT=${OUT:-gaps}
RT=${RT:-}                                             # "chrt -r" beside other work, or empty
WINDOW=${WINDOW:-240}                                  # seconds of arrivals
SPEED=${SPEED:-1.3} PROFILE=${PROFILE:-0.692,120s}     # 0.4 to 2.2
COUNT=${COUNT:-5000} ORDER=${ORDER:-0}
BASELINE=${BASELINE:-0.5} MAX_SYS=${MAX_SYS:-256} GATE=${GATE-',"accounting":"cap"'} DISPATCH=${DISPATCH:---concurrency 512 --budget-log-interval 1s}
FRONT=${FRONT:---router-mode kv --router-prefill-load-scale 4 --active-decode-blocks-threshold 0.86 --active-prefill-tokens-threshold 27000 --queue-size 8 --queue-timeout 500ms}

dir=$OUT/$name
rm -rf "$dir" && mkdir -p "$dir" || exit 1
rt() { local p=$1; shift; if [ -n "$RT" ]; then exec $RT "$p" "$@"; else exec "$@"; fi; }
up() { for _ in $(seq 100); do curl -sf -o /dev/null "$1" && return; sleep .2; done; echo "$name: $1 does not answer"; exit 1; }
pids=()
finish() { # the last first: a dispatcher whose Redis is gone takes its time
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill "${pids[i]}" 2>/dev/null; wait "${pids[i]}" 2>/dev/null; done
  rm -rf "$dir/redis"
}
trap finish EXIT

front=http://127.0.0.1:$((port + 10)) redis=$((port + 11)) api=http://127.0.0.1:$((port + 12))
workers=$(for i in 0 1 2 3; do echo -n "http://127.0.0.1:$((port + i)),"; done)
(rt 50 "$BIN" sim --count 4 --kv-blocks 32768 --host 127.0.0.1 --port "$port") >"$dir/sim.log" 2>&1 &
measured=$!; pids+=($!)
sleep 1
(rt 40 "$BIN" frontend --http-host 127.0.0.1 --http-port $((port + 10)) --workers "${workers%,}" $FRONT) >"$dir/front.log" 2>&1 &
measured+=,$!; pids+=($!)

dispatcher() {
  rt 30 "$BIN" dispatch --host 127.0.0.1 --port $((port + 12)) --health-port $((port + 13)) --metrics-port $((port + 14)) \
    --transport-config-file "$dir/queues.json" "$@"
}
if [ "$arm" = with ]; then
  mkdir "$dir/redis"
  (rt 30 "$REDIS" --port $redis --bind 127.0.0.1 --dir "$dir/redis" --appendonly yes --appendfsync always --save '') >"$dir/redis.log" 2>&1 &
  measured+=,$!; pids+=($!)
  cat >"$dir/queues.json" <<J
{"url":"redis://127.0.0.1:$redis/0","queues":[{"queue_name":"batch","igw_base_url":"$front","request_path_url":"/v1/completions","gate_type":"spillway",
 "gate_params":{"pool":"sim-model","endpoint":"$front","baseline":$BASELINE,"max_sys":$MAX_SYS$GATE}}]}
J
  sleep .5
  (dispatcher --dry-run) >"$dir/submit.log" 2>&1 & # takes the requests in, and sends none
  pids+=($!)
  up http://127.0.0.1:$((port + 13))/readyz
  python3 "$here/gaps.py" batch "$COUNT" 512 128 | "$BIN" dispatch submit - --url "$api" >/dev/null 2>>"$dir/submit.log" || { echo "$name: submit has failed"; exit 1; }
  kill "${pids[-1]}"; wait "${pids[-1]}"
fi
up "$front/health"
sleep 2
watched=-
if [ "$arm" = with ]; then
  (dispatcher $DISPATCH) >"$dir/dispatch.log" 2>&1 &
  measured+=,$!; pids+=($!)
  watched=$api
fi
(rt 31 python3 "$here/gaps.py" watch "$front" $watched "$dir/samples.jsonl") &
pids+=($!)
cat >"$dir/settings.json" <<J
{"arm":"$arm","seed":$seed,"order":$ORDER,"begun":$(date +%s.%N),"window":$WINDOW,"count":$COUNT,"baseline":$BASELINE,"max_sys":$MAX_SYS}
J
first=$(python3 -c "print(f'{$SPEED*$WINDOW:.1f}s')")
(rt 45 "$BIN" replay --url "$front" --trace "$TRACE" --first "$first" --spread 3s --seed "$seed" --speed "$SPEED" --speed-profile "$PROFILE" \
  --slo-ttft 2s+2x20000 --slo-itl 30ms --pids $measured --stats-url http://127.0.0.1:$port --json "$dir/replay.json") >"$dir/replay.log" 2>&1 ||
  echo "$name: replay has failed: $(tail -1 "$dir/replay.log")"
curl -s "$front/metrics" >"$dir/front.metrics"
[ "$arm" = with ] && curl -s http://127.0.0.1:$((port + 14))/metrics >"$dir/dispatch.metrics"
date -u +"%H:%M:%S $name done"
