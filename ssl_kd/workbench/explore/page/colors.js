// Colors of clusters, and of numbers from low to high.

export const GRAY = "#8b949e";
const PALETTE = ["#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#a96b59", "#e76300", "#b9ac70",
  "#92dadd"]; // with the rule below: as in the report (report/figures.py)
export const RAMP = ["#3b4cc0", "#5b8dd6", "#86c5c2", "#d9d27a", "#f2a14a", "#c8362f"];

/** The color of a cluster. */
export const clusterColor = (k) => (k < 0 ? GRAY : k < PALETTE.length ? PALETTE[k]
  : `hsl(${(k * 137.508) % 360} ${55 + (k % 3) * 12}% ${48 + (k % 4) * 7}%)`);

/** The color at `t` between the ends of the ramp, 0 to 1. */
export function rampColor(t) {
  const at = Math.min(t * (RAMP.length - 1), RAMP.length - 1.001), i = Math.floor(at);
  const channel = (color, k) => parseInt(color.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mixed = [0, 1, 2].map((k) => Math.round(
    channel(RAMP[i], k) * (1 - at + i) + channel(RAMP[i + 1], k) * (at - i)));
  return "#" + mixed.map((v) => v.toString(16).padStart(2, "0")).join("");
}

/** Colors as #rrggbb, because regl-scatterplot reads no hsl. */
export function toHex(colors) {
  const context = document.createElement("canvas").getContext("2d");
  return colors.map((c) => { context.fillStyle = c; return context.fillStyle; });
}
