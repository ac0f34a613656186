// What a sample is, if it is no picture: a text, a link or a sound.

import { TOKEN, get } from "./data.js";

/** The element that shows a sample, or null; sounds only where they `canPlay`. */
export async function mediaElement(meta, row, canPlay = false) {
  const kind = meta.media?.kind, className = "media";
  if (!TOKEN || !kind || kind === "image") return null;
  if (kind === "audio") {
    return canPlay ? Object.assign(new Audio(`api/media/${row}`), { className, controls: true }) : null;
  }
  const { text, url, characters } = await (await get(`api/media/${row}`)).json();
  const element = document.createElement(url ? "a" : "div");
  if (url) Object.assign(element, { href: url, target: "_blank", rel: "noreferrer noopener" });
  const rest = characters - (url ?? text).length; // the page gets the beginning of a long text
  const end = rest > 0 ? `… (${rest.toLocaleString("en")} more characters)` : "";
  return Object.assign(element, { className, textContent: (url ?? text) + end });
}
