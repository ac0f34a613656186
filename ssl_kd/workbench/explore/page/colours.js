// Colours of clusters, and of numbers from low to high.

export const GREY = "#8b949e";
const PALETTE = ["#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#a96b59", "#e76300", "#b9ac70",
  "#92dadd"]; // with the rule below: as in the report (report/figures.py)
export const RAMP = ["#3b4cc0", "#5b8dd6", "#86c5c2", "#d9d27a", "#f2a14a", "#c8362f"];

/** Of a cluster, always the same. */
export const tint = (k) => (k < 0 ? GREY : k < PALETTE.length ? PALETTE[k]
  : `hsl(${(k * 137.508) % 360} ${55 + (k % 3) * 12}% ${48 + (k % 4) * 7}%)`);

/** Between the ends of the ramp, 0 to 1. */
export function mixed(t) {
  const at = Math.min(t * (RAMP.length - 1), RAMP.length - 1.001), i = Math.floor(at);
  const part = (c, k) => parseInt(c.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mix = [0, 1, 2].map((k) => Math.round(
    part(RAMP[i], k) * (1 - at + i) + part(RAMP[i + 1], k) * (at - i)));
  return "#" + mix.map((v) => v.toString(16).padStart(2, "0")).join("");
}

/** Colours as the library takes them; it reads no hsl. */
export function plain(colours) {
  const context = document.createElement("canvas").getContext("2d");
  return colours.map((c) => { context.fillStyle = c; return context.fillStyle; });
}
