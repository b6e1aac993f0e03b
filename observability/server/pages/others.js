// The pages of other ranks, for the time after the asked one: links to them, and the first that answers. Links bear the token: there
// is none to a rank that may have ended since, whose port a program of another user may have by now. A program that happens
// to listen at a rank's port, as beside a forwarded one, is told apart by a file of the page.

import { linkTo } from "./session.js";

const OFFERED = 4, LIMIT_MS = 2000, FILE = "/others.js";

const fileAt = async origin => (await fetch(origin + FILE, { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) })).text();
const own = fileAt(location.origin).catch(() => null);

// Ranks that answered, first those with the lowest numbers, then those of other hosts: a host may have failed.
export function others(job, asked) {
  const known = (job?.ranks ?? []).filter(rank => rank.url?.startsWith("http") && rank.rank !== asked && rank.state !== "silent");
  const host = job?.ranks.find(rank => rank.rank === asked)?.host, elsewhere = known.filter(rank => rank.host !== host);
  const some = new Set([...known.slice(0, OFFERED), ...elsewhere.slice(0, OFFERED)]);
  return [...some].map(rank => [rank.rank, linkTo(rank.url), rank.url]).filter(([, link]) => link);
}

// The link to the first of these ranks that answers with a page of this version; empty where none does.
export async function answering(some) {
  const mine = await own;
  const answers = await Promise.all(some.map(([, , url]) => fileAt(url).catch(() => null)));
  const first = answers.findIndex(answer => answer !== null && answer === mine);
  return first < 0 ? "" : some[first][1];
}
