#!/usr/bin/env python3
"""Has batch filled the gaps? Makes the batch, watches a run, compares pairs of runs, and draws one.

    gaps.py batch COUNT ISL OSL > batch.jsonl       requests for `spillway dispatch submit`
    gaps.py watch FRONTEND DISPATCHER OUT           samples both, five times a second, until SIGTERM
    gaps.py report DIRECTORY                        pairs of runs as gaps.sh leaves them
    gaps.py plot DIRECTORY PAIR OUT.png             needs matplotlib
"""
import http.client
import json
import math
import pathlib
import random
import re
import signal
import statistics
import sys
import time

STEP = 0.2  # seconds between samples


def batch(count, isl, osl):
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz      "
    for i in range(count):
        prompt = "".join(chance.choices(letters, k=4 * isl))  # four bytes a token
        print(json.dumps({"id": f"batch-{i}", "payload": {
            "model": "sim-model", "prompt": prompt, "max_tokens": osl, "ignore_eos": True,
            "priority": 10}}))  # vLLM's: a higher number goes later


class Page:
    """One address that is asked again and again; None while there is no answer."""

    def __init__(self, url):
        host, _, path = url.removeprefix("http://").partition("/")
        self.host, self.path, self.conn = host, "/" + path, None

    def read(self):
        try:
            if self.conn is None:
                self.conn = http.client.HTTPConnection(self.host, timeout=2)
            self.conn.request("GET", self.path)
            answer = self.conn.getresponse()
            body = answer.read()
            return json.loads(body) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            self.conn = None
            return None


def watch(front, dispatcher, out):
    capacity = Page(front + "/internal/capacity?pool=sim-model")
    status = Page(dispatcher + "/internal/dispatch/status") if dispatcher != "-" else None
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    with open(out, "w") as f:
        begun, n = time.time(), 0
        while not ended:
            sample = {"t": time.time(), "capacity": capacity.read()}
            if status is not None:
                sample["dispatch"] = status.read()
            f.write(json.dumps(sample) + "\n")
            n += 1
            time.sleep(max(0, begun + n * STEP - time.time()))


class Run:
    """One run: what replay reported, and the samples from its begin to the end of its arrivals."""

    def __init__(self, path):
        self.report = json.loads((path / "replay.json").read_text())
        self.settings = json.loads((path / "settings.json").read_text())
        page = path / "dispatch.metrics"
        text = page.read_text() if page.exists() else ""
        self.counts = {name: int(sum(float(v) for v in re.findall(
            rf"^spillway_dispatch_{name}_total{{.*}} (\S+)$", text, re.M)))
            for name in ("requests", "retries", "shed_requests", "successful_requests")}
        window = self.settings["window"]
        self.t, self.d, self.batch, self.interactive, self.backlog, self.done = [], [], [], [], [], []
        begun, backlog, done = self.settings["begun"], self.settings["count"], 0
        for line in (path / "samples.jsonl").open():
            s = json.loads(line)
            t, c = s["t"] - begun, s["capacity"]
            if not 0 <= t <= window or c is None:
                continue
            self.t.append(t)
            self.d.append(min(1, max(0, 1 - c["fullness"])))
            self.batch.append(c["inflight"]["batch"]["requests"])
            self.interactive.append(c["inflight"]["interactive"]["requests"])
            if s.get("dispatch"):  # else it did not answer: what was last known stands
                queue = s["dispatch"]["queues"][0]
                backlog = queue["pending"] + queue["delayed"]
                done = self.settings["count"] - backlog - queue["leased"]
            self.backlog.append(backlog)
            self.done.append(done)
        # The batch can be measured only while there is some.
        self.until = next((t for t, b in zip(self.t, self.backlog) if b == 0), window)

    def integral(self, values, until):
        """Values times seconds."""
        return sum(v * (b - a) for v, a, b in zip(values, self.t, self.t[1:]) if b <= until)

    def free(self, rule, until):
        """The free capacity that D showed, by the settings of a run: max_SYS x (D - B) requests at each
        moment, summed up in request-seconds."""
        return self.integral([rule["max_sys"] * max(0, d - rule["baseline"]) for d in self.d], until)

    def done_by(self, until):
        return max((n for t, n in zip(self.t, self.done) if t <= until), default=0)

    def attainment(self):
        return 100 * self.report["slo"]["met_share"]

    def shed(self):
        return 100 * self.report["shed"] / self.report["offered"]


# Student's t of 95 %, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(values):
    """Mean and half of the 95 % interval by Student's t."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def pairs(directory):
    for path in sorted(pathlib.Path(directory).glob("pair*-with")):
        without = path.with_name(path.name.replace("-with", "-without"))
        if (path / "replay.json").exists() and (without / "replay.json").exists():
            yield path.name.removesuffix("-with"), Run(path), Run(without)


def tell(arm, run):
    r = run.report
    ttft = "/".join(f"{r['ttft'][q + '_ms'] / 1e3:.2f}" for q in ("p50", "p90", "p99"))
    print(f"  {arm:8} offered {r['offered']}, shed {run.shed():.2f} %, SLO {run.attainment():.2f} % "
          f"(missed TTFT {r['slo']['missed_ttft']}, ITL {r['slo']['missed_itl']}, failed {r['failed']}), TTFT {ttft} s, "
          f"ITL p99 {r['itl']['p99_ms']:.1f} ms, cached {100 * r['cached_share']:.1f} %, mean D {run.integral(run.d, math.inf) / run.t[-1]:.3f}")
    print(f"           {'valid' if r['validity']['ok'] else 'NOT VALID'}: "
          + ", ".join(f"{c['name']} {c['detail']}" for c in r["validity"]["checks"][:3]))


def report(directory):
    slo, shed, used, refused = [], [], [], []
    for name, w, o in pairs(directory):
        if w.report["arrival_hash"] != o.report["arrival_hash"]:
            sys.exit(f"{name}: the two runs had different arrivals")
        print(f"{name}: arrivals {w.report['arrival_hash'][:8]}, the run with the dispatcher was number {w.settings['order']}")
        tell("without", o)
        tell("with", w)
        free, got = o.free(w.settings, w.until), w.integral(w.batch, w.until)
        c = w.counts
        slo.append(w.attainment() - o.attainment())
        shed.append(w.shed() - o.shed())
        used.append(100 * got / free)
        refused.append(100 * c["shed_requests"] / max(1, c["requests"] + c["retries"]))
        print(f"  batch    {c['successful_requests']} answered of {c['requests']} sent ({c['retries']} retries), {c['shed_requests']} refused, "
              f"{w.done_by(w.until) / w.until:.1f} requests/s while the queue lasted ({w.until:.0f} of {w.settings['window']} s); "
              f"request-seconds: free {free:.0f}, used {got:.0f} ({used[-1]:.1f} %), left over {w.free(w.settings, w.until):.0f}")
    if not slo:
        sys.exit("no whole pair")
    for what, values, unit in (("SLO attainment, with - without", slo, "points"), ("shed share, with - without", shed, "points"),
                               ("used of the free capacity", used, "%"), ("batch requests refused", refused, "%")):
        mean, half = interval(values)
        print(f"{what}: {mean:+.2f} {unit}, 95 % {mean - half:+.2f} to {mean + half:+.2f} "
              f"({len(values)} pairs: {' '.join(f'{v:+.2f}' for v in values)})")


def smooth(t, values, width=2.0):
    """Mean over the last seconds: the loads jump with each prompt."""
    out, first, total = [], 0, 0.0
    for i, v in enumerate(values):
        total += v
        while t[i] - t[first] > width:
            total -= values[first]
            first += 1
        out.append(total / (i - first + 1))
    return out


def plot(directory, pair, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    w, o = next((w, o) for name, w, o in pairs(directory) if name == pair)
    s = w.settings
    fig, axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True)
    axes[0].plot(o.t, smooth(o.t, o.interactive), color="#5794F2", label="without the dispatcher")
    axes[0].plot(w.t, smooth(w.t, w.interactive), color="#F2495C", label="with it", lw=1)
    axes[0].set_ylabel("interactive requests\nin flight")
    axes[1].plot(o.t, smooth(o.t, o.d), color="#5794F2", label="D without the dispatcher")
    axes[1].plot(w.t, smooth(w.t, w.d), color="#F2495C", label="D with it", lw=1)
    axes[1].axhline(s["baseline"], color="gray", ls="--", label="baseline B")
    axes[1].set_ylabel("free part")
    free = [s["max_sys"] * max(0, d - s["baseline"]) for d in o.d]
    axes[2].fill_between(o.t, smooth(o.t, free), color="#73BF69", alpha=.35, label="free: max_SYS x (D - B), without the dispatcher")
    axes[2].plot(w.t, smooth(w.t, w.batch), color="#37872D", label="batch requests in flight")
    axes[2].set_ylabel("requests")
    axes[2].set_xlabel("seconds; means of the last two seconds")
    for a in axes:
        a.grid(alpha=.3)
        a.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)
        a.set_xlim(0, s["window"])
        a.set_ylim(bottom=0)
    fig.tight_layout()
    fig.savefig(out, dpi=90)


def main():
    command, args = sys.argv[1], sys.argv[2:]
    if command == "batch":
        batch(*map(int, args))
    elif command in ("watch", "report", "plot"):
        {"watch": watch, "report": report, "plot": plot}[command](*args)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
