// Follow the decisions that others make in the same run.

import { get } from "./data.js";
import { describe, showMessage } from "./messages.js";

const PAUSE = 2000, LONGEST = 60000; // milliseconds between requests; without an answer, up to the second

/** Show new decisions of others as they come, while the page is visible. */
export async function follow(app) {
  for (let pause = PAUSE; ;) {
    await new Promise((done) => setTimeout(done, pause));
    if (document.hidden) continue;
    const { decisions } = app;
    try {
      const { lines } = await (await get("api/version")).json();
      if (pause > PAUSE) showMessage("The server answers again");
      pause = PAUSE;
      if (lines === decisions.lines.length || decisions !== app.decisions || app.isDeciding) continue;
      await app.showDecisions(await (await get("data/decisions.json")).json());
      showMessage(`Changed elsewhere: ${describe(app.decisions.lines.at(-1))}`);
    } catch (error) {
      if (pause === PAUSE) showMessage(`The server does not answer: ${error.message}`, true, true);
      pause = Math.min(2 * pause, LONGEST);
    }
  }
}
