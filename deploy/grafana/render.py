#!/usr/bin/env python3
"""Draws the panels of spillway.json with matplotlib from what a Prometheus holds.

For a look at the dashboard where there is no Grafana: the queries, units, colours, thresholds and
mappings are the dashboard's own. One picture a row of panels; panels whose query gave nothing are
named at the end.

    render.py http://localhost:9090 START END OUT-DIRECTORY [--step 2] [--model REGEX]

START and END are Unix seconds. Needs matplotlib and requests.
"""
import argparse
import datetime
import json
import math
import pathlib
import re

import matplotlib
import requests

matplotlib.use("Agg")
import matplotlib.dates as dates
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

COLOURS = {"green": "#73BF69", "red": "#F2495C", "orange": "#FF9830", "purple": "#B877D9",
           "blue": "#5794F2", "gray": "#8e8e8e", "text": "#ccccdc", "transparent": None}
SERIES = ["#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#705DA0",
          "#37872D", "#FADE2A", "#447EBC", "#C15C17", "#890F02", "#0A437C", "#6D1F62", "#584477"]
STYLE = {"figure.facecolor": "#111217", "axes.facecolor": "#181b1f", "text.color": "#ccccdc",
         "axes.edgecolor": "#333", "axes.labelcolor": "#ccccdc", "xtick.color": "#9a9aa5",
         "ytick.color": "#9a9aa5", "font.size": 7, "grid.color": "#2c2f36"}
UNITS = {"reqps": " req/s", "cps": " c/s", "short": "", "none": ""}


def scaled(value, steps, unit=""):
    """Value in the largest of steps, (size, name) descending, that it reaches."""
    for size, name in steps:
        if abs(value) >= size:
            return f"{value / size:.3g}{name}{unit}"
    return f"{value:.3g}{unit}"


def in_unit(value, unit, decimals=None):
    if value is None or math.isnan(value):
        return "NaN"
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f}%"
    if unit in ("s", "ms"):
        seconds = value if unit == "s" else value / 1e3
        return scaled(seconds, [(3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs")])
    return scaled(value, [(1e9, "G"), (1e6, "M"), (1e3, "K")], UNITS.get(unit, f" {unit}"))


class Dashboard:
    def __init__(self, options):
        self.url, self.start, self.end = options.prometheus, options.start, options.end
        self.step, self.model, self.empty = options.step, options.model, []

    def ask(self, path, expression, **parameters):
        expression = (expression.replace("$__rate_interval", "15s")
                      .replace("$__range", f"{self.end - self.start}s").replace("$model", self.model))
        answer = requests.post(self.url + path, data=dict(query=expression, **parameters), timeout=60).json()
        if answer["status"] != "success":
            raise SystemExit(f"{expression}: {answer}")
        return answer["data"]["result"]

    def series(self, panel):
        """(legend, labels, times, values) of every series of a panel; gaps are NaN."""
        times = list(range(self.start, self.end + 1, self.step))
        out = []
        for target in panel["targets"]:
            found = self.ask("/api/v1/query_range", target["expr"], start=self.start, end=self.end, step=self.step)
            for one in found:
                values = {int(float(at)): float(v) for at, v in one["values"]}
                out.append((legend(target["legendFormat"], one["metric"]), one["metric"],
                            [datetime.datetime.fromtimestamp(t) for t in times],
                            [values.get(t, math.nan) for t in times]))
            if not found:
                self.empty.append(f"{panel['title']} {target['refId']}")
        return out

    def draw(self, ax, panel):
        ax.set_title(panel["title"], loc="left", fontsize=8.5, color="#fff")
        kind = panel["type"]
        if kind == "stat":
            return self.stat(ax, panel)
        series = self.series(panel)
        ax.xaxis.set_major_formatter(dates.DateFormatter("%M:%S"))
        if not series:
            return None
        if kind == "heatmap":
            return heatmap(ax, series)
        if kind == "state-timeline":
            return timeline(ax, series, panel["fieldConfig"]["defaults"]["mappings"][0]["options"], self.step)
        return lines(ax, series, panel)

    def stat(self, ax, panel):
        defaults = panel["fieldConfig"]["defaults"]
        found = self.ask("/api/v1/query", panel["targets"][0]["expr"], time=self.end)
        value = float(found[0]["value"][1]) if found else math.nan
        colour = "text"
        for step in defaults.get("thresholds", {}).get("steps", []):
            if step["value"] is None or value >= step["value"]:
                colour = step["color"]
        text = in_unit(value, defaults["unit"], defaults.get("decimals")) if found else defaults.get("noValue", "No data")
        if not found:
            self.empty.append(panel["title"])
        ax.axis("off")
        ax.text(.5, .5, text, ha="center", va="center", fontsize=17, color=COLOURS[colour])


def legend(form, labels):
    if form == "__auto":
        return ",".join(f"{k}={v}" for k, v in labels.items() if k != "__name__") or "value"
    return re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), form)


def overrides(panel, name):
    style = {}
    for one in panel["fieldConfig"]["overrides"]:
        match = one["matcher"]
        if match["options"] != name if match["id"] == "byName" else not re.search(match["options"], name):
            continue
        for p in one["properties"]:
            if p["id"] == "color":
                style["color"] = COLOURS[p["value"]["fixedColor"]]
            elif p["id"] == "custom.lineStyle":
                style["linestyle"] = (0, (5, 4))
            elif p["id"] == "custom.axisLabel":
                style["right"] = p["value"]
            elif p["id"] == "custom.lineWidth":
                style["linewidth"] = p["value"] * .7
    return style


def heatmap(ax, series):
    series = sorted(series, key=lambda s: float(s[1]["le"]))
    below, rows = [0] * len(series[0][2]), []
    for _, _, _, values in series:  # buckets are cumulative
        values = [0 if math.isnan(v) else v for v in values]
        rows.append([math.sqrt(v - b) if v - b > 1e-9 else math.nan for v, b in zip(values, below)])
        below = values
    times = series[0][2]
    ax.imshow(rows, aspect="auto", origin="lower", cmap="Blues_r",
              extent=[dates.date2num(times[0]), dates.date2num(times[-1]), 0, len(rows)])
    bounds = [s[1]["le"] if s[1]["le"] == "+Inf" else in_unit(float(s[1]["le"]), "short") for s in series]
    ax.set_yticks(range(1, len(series) + 1, 2), bounds[::2])
    ax.xaxis_date()


def timeline(ax, series, mapping, step):
    series.sort(key=lambda s: s[0])
    for row, (_, _, times, values) in enumerate(series):
        for at, v in zip(times, values):
            if not math.isnan(v):
                ax.barh(-row, step / 86400, left=dates.date2num(at), height=.85, lw=0,
                        color=COLOURS[mapping.get(str(int(v)), {"color": "gray"})["color"]])
    ax.set_yticks([-row for row in range(len(series))], [s[0] for s in series])
    ax.xaxis_date()
    ax.legend(handles=[Patch(color=COLOURS[o["color"]], label=o["text"]) for o in mapping.values()],
              loc="upper center", bbox_to_anchor=(.5, -.1), ncol=6, frameon=False)


def lines(ax, series, panel):
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults["custom"], defaults["unit"]
    axis = lambda v, _: in_unit(v, unit)
    floor = None
    for i, (name, _, times, values) in enumerate(series):
        style = {"color": SERIES[i % len(SERIES)], "linewidth": 1, **overrides(panel, name)}
        right = style.pop("right", None)
        fill = {"color": style["color"], "alpha": custom.get("fillOpacity", 0) / 100, "lw": 0}
        if "stacking" in custom:
            values = [0 if math.isnan(v) else v for v in values]
            floor = floor or [0] * len(values)
            values = [a + b for a, b in zip(floor, values)]
            ax.fill_between(times, floor, values, **fill)
            floor = values
        elif custom.get("fillOpacity") and right is None:
            ax.fill_between(times, 0, values, **fill)
        if right is None:
            ax.plot(times, values, label=name, **style)
            continue
        other = ax.twinx()
        other.plot(times, values, **style)
        other.set_ylim(bottom=0)
        other.yaxis.set_major_formatter(axis)
        ax.plot([], [], label=f"{name} (right)", **style)
    if "thresholdsStyle" in custom:
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None:
                ax.axhline(step["value"], color=COLOURS[step["color"]], ls="--", lw=1)
    if custom.get("scaleDistribution", {}).get("type") == "log":
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    ax.set_ylabel(custom.get("axisLabel", ""))
    ax.yaxis.set_major_formatter(axis)
    ax.grid(lw=.5)
    ax.set_xlim(series[0][2][0], series[0][2][-1])
    ax.legend(loc="upper center", bbox_to_anchor=(.5, -.1), ncol=min(4, len(series)), frameon=False, fontsize=6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prometheus")
    parser.add_argument("start", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--step", type=int, default=2, help="seconds between points")
    parser.add_argument("--model", default=".*", help="the models to show, a regular expression")
    options = parser.parse_args()
    plt.rcParams.update(STYLE)
    options.out.mkdir(parents=True, exist_ok=True)
    dashboard = Dashboard(options)
    rows = []
    for panel in json.loads(pathlib.Path(__file__).with_name("spillway.json").read_text())["panels"]:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    for number, (title, panels) in enumerate(rows, 1):
        top = min(p["gridPos"]["y"] for p in panels)
        units = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) - top
        inches = max(2.2, units * .37)
        share = inches / (inches + .4)  # the rest is the title's
        figure = plt.figure(figsize=(16, inches + .4))
        figure.text(.01, 1 - .25 / (inches + .4), title, fontsize=12, color="#fff")
        for panel in panels:
            at = panel["gridPos"]
            left, width = at["x"] / 24, at["w"] / 24
            bottom, height = (1 - (at["y"] - top + at["h"]) / units) * share, at["h"] / units * share
            if panel["type"] == "stat":
                ax = figure.add_axes([left + .005, bottom + .05, width - .01, height * .75])
            else:
                margin = .075 if panel["type"] == "state-timeline" else .045
                ax = figure.add_axes([left + margin * .9, bottom + height * .24, width - margin - .008, height * .62])
            dashboard.draw(ax, panel)
        figure.savefig(options.out / f"{number}-{title.lower().replace(' ', '-')}.png", dpi=95)
        plt.close(figure)
    print("no data:", "; ".join(dashboard.empty) or "none")


main()
