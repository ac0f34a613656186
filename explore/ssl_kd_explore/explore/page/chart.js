// The chart of the dock: one column of the table, for each cluster.

import { MISSING, clusterColor } from "./colors.js";
import { get } from "./data.js";
import { $, make, number, percent, round } from "./messages.js";

function add(parent, tag, className, textContent = "", style = {}) {
  const part = make(tag, { className, textContent });
  Object.assign(part.style, style);
  parent.append(part);
  return part;
}

export class Chart {
  constructor(box, app) {
    Object.assign(this, { box, app });
    const shown = (app.meta.table ?? []).filter(({ name, kind }) =>
      !["cluster", "file"].includes(name) && !["media", "text"].includes(kind));
    $("chart-column").replaceChildren(...shown.map(({ name }) => new Option(name.replaceAll("_", " "), name)));
    $("chart-column").onchange = $("chart-order").onchange = () => this.show();
  }

  async show() {
    const column = $("chart-column").value;
    const { kind, values, clusters } = await (await get(`api/chart?${new URLSearchParams({ column })}`)).json();
    if (column !== $("chart-column").value) return; // the user chose another one meanwhile
    const center = kind === "number" ? ({ quantiles }) => quantiles?.[2] ?? -Infinity
      : ({ counts, n }) => Math.max(...counts) / n;
    const key = $("chart-order").value === "size" ? ({ n }) => n : center;
    clusters.sort((a, b) => key(b) - key(a));
    this.box.replaceChildren();
    const draw = kind === "number" ? this.scale(clusters) : this.legend(values, column);
    for (const one of clusters) {
      const line = add(this.box, "button", "chart-line"), name = add(line, "span", "chart-name");
      add(name, "i", "", "", { background: clusterColor(one.cluster) });
      name.append(this.app.nameOf(one.cluster));
      line.title = `${this.app.nameOf(one.cluster)}: ${draw(add(line, "span", "track"), one)}`;
      line.dataset.cluster = one.cluster;
      line.onclick = () => this.app.clusters.select(one.cluster);
      add(line, "small", "", number(one.n));
    }
    this.mark();
  }

  draw() {} // sizes are in percent

  /** Mark the cluster that is selected. */
  mark() {
    const { chosen, decisions } = this.app, k = chosen.length ? decisions.clusters[chosen[0]] : -1;
    const isOne = k >= 0 && chosen.every((row) => decisions.clusters[row] === k);
    for (const line of this.box.querySelectorAll("button")) line.ariaPressed = isOne && line.dataset.cluster === `${k}`;
  }

  /** Draw an axis; return what draws a box from 25 to 75 %, a line from 5 to 95 %, and the median. */
  scale(clusters) {
    const all = clusters.flatMap(({ quantiles }) => quantiles ?? []), low = Math.min(...all);
    const span = Math.max(...all) - low || 1, at = (value) => `${(100 * (value - low)) / span}%`;
    const power = 10 ** Math.floor(Math.log10(span / 4)), step = power * [5, 2, 1].find((k) => k * power <= span / 4);
    const head = add(this.box, "div", "chart-line"), axis = (add(head, "span", ""), add(head, "span", "track axis"));
    for (let k = Math.ceil(low / step); k * step <= low + span && all.length; k++) {
      add(axis, "small", "", round(k * step), { left: at(k * step) });
    }
    return (track, { cluster, quantiles }) => {
      if (!quantiles) return "no values";
      const [p5, p25, p50, p75, p95] = quantiles, background = clusterColor(cluster);
      const width = (from, to) => `${(100 * (to - from)) / span}%`;
      add(track, "i", "whisker", "", { left: at(p5), width: width(p5, p95), background });
      add(track, "i", "box", "", { left: at(p25), width: width(p25, p75), background });
      add(track, "i", "median", "", { left: at(p50) });
      return `median ${round(p50)}; half from ${round(p25)} to ${round(p75)}; 90 % from ${round(p5)} to ${round(p95)}`;
    };
  }

  /** Draw a legend; return what draws a bar with a part for each value. */
  legend(values, column) {
    const known = this.app.meta.columns[column]?.values ?? values; // with the colors of the map
    const colors = values.map((value) => (known.includes(value) && value !== "other" ? clusterColor(known.indexOf(value)) : MISSING));
    const names = values.map((value) => `${value ?? ""}` || "none"), head = add(this.box, "div", "chart-legend");
    names.forEach((name, i) => add(add(head, "span", ""), "i", "", "", { background: colors[i] }).after(name));
    return (track, { counts, n }) => {
      track.classList.add("stack");
      counts.forEach((count, i) => add(track, "i", "", "", { width: `${(100 * count) / n}%`, background: colors[i] }));
      return counts.map((count, i) => [count, names[i]]).filter(([count]) => count).sort((a, b) => b[0] - a[0]).slice(0, 4)
        .map(([count, name]) => `${name} ${percent(count / n)}`).join(", ");
    };
  }
}
