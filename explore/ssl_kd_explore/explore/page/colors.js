// Colors of clusters, and of numbers from low to high: the table of ssl_kd/core/colors.py, in meta.json.

let clusters = [];
export let MISSING, RAMP;

/** Set the table: colors of clusters, of a missing value, and of numbers from low to high. */
export function setColors(table) {
  [clusters, MISSING, RAMP] = [table.clusters, table.missing, table.ramp];
}

/** The color of a cluster. */
export const clusterColor = (k) => (k < 0 ? MISSING : clusters[k % clusters.length]);

/** The color at `t` between the ends of the ramp, 0 to 1. */
export function rampColor(t) {
  const at = Math.min(t * (RAMP.length - 1), RAMP.length - 1.001), i = Math.floor(at);
  const channel = (color, k) => parseInt(color.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mixed = [0, 1, 2].map((k) => Math.round(
    channel(RAMP[i], k) * (1 - at + i) + channel(RAMP[i + 1], k) * (at - i)));
  return "#" + mixed.map((v) => v.toString(16).padStart(2, "0")).join("");
}

/** A color as #rrggbb, because regl-scatterplot reads no other. */
export function toHex(color) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = color;
  return context.fillStyle;
}
