// Requests with the page token. The link to the page has the token of the job in its fragment, which no server receives. It is
// exchanged for a token that permits reading this control plane only; the session storage of this origin keeps that.

const KEY = "dist2-page-token";
let linked = null, jobToken = null;

// The rank whose page has led here as it did not answer any more; null where none has.
export let before = null;

function takeLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  if (!link.has("token")) return;
  linked = link.get("token");
  before = link.get("before");
  history.replaceState(null, "", location.pathname + location.search);
}

async function signIn() {
  const token = linked;  // several requests may sign in at a time
  const answer = await fetch("/page-token", { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (answer.ok) sessionStorage.setItem(KEY, (await answer.json()).token);
  else sessionStorage.removeItem(KEY);
  jobToken = token;  // until the tab is closed or loaded again: all ranks of the job have the same
  linked = null;
}

// The link to the page of another rank; empty where this tab does not know the token of the job any more.
export const linkTo = url => jobToken === null ? "" : `${url}/#token=${jobToken}`;

async function ask(path, signal) {
  if (linked !== null) await signIn();
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` };
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.status === 401) throw new Error("This tab is not signed in: open the link with the token, Server.page_url.");
  if (!answer.ok) throw new Error((await answer.json()).reason ?? `The control plane answered ${answer.status}.`);
  return answer;
}

export async function get(path, limit = 8000) {
  return (await ask(path, AbortSignal.timeout(limit))).json();
}

// Server-sent events. An EventSource cannot send a header.
export async function* events(path, signal) {
  const reader = (await ask(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}

// Save the answer at a path as a file, or show it in another tab.
export async function open(path) {
  const answer = await ask(path), link = document.createElement("a");
  const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "");
  link.href = URL.createObjectURL(await answer.blob());
  if (name) link.download = name[1];
  else link.target = "_blank";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

takeLink();
addEventListener("hashchange", takeLink);
