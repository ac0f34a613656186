// What a sample is, if it is no picture: a text, a link or a sound.

import { TOKEN, get } from "./data.js";

const EVENTS = ["play", "pause", "ended"];

/** Play a sound, or stop it; stopping one that is still loading is no error. */
export async function toggle(sound) {
  if (!sound.paused) return sound.pause();
  try {
    await sound.play();
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

const player = TOKEN ? new Audio() : null;

/** A button that plays the sound of a sample, or stops it; one sound plays at a time. */
export function playButton(row) {
  const button = document.createElement("button");
  const show = () => {
    const isPlaying = player.dataset.row === `${row}` && !player.paused;
    Object.assign(button, { textContent: isPlaying ? "◼" : "▶", ariaLabel: isPlaying ? "Stop" : "Play" });
    if (!button.isConnected) for (const event of EVENTS) player.removeEventListener(event, show);
  };
  for (const event of EVENTS) player.addEventListener(event, show);
  Object.assign(button, { className: "play", type: "button", title: "Play or stop", textContent: "▶", ariaLabel: "Play" });
  button.onclick = (event) => {
    event.stopPropagation();
    if (player.dataset.row !== `${row}`) Object.assign(player, { src: `api/media/${row}` }).dataset.row = row;
    return toggle(player);
  };
  return button;
}

/** Whether samples without pictures can be opened large. */
export const isLarge = (meta) => TOKEN !== "" && ["text", "url", "audio"].includes(meta.media?.kind);

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
