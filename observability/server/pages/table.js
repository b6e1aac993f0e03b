// Tables that are updated in place: a cell whose content stays is not touched, so focus and selection stay.

export const $ = id => document.getElementById(id);

// Text goes in as text, never as markup.
export function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A value is a text or {text, tone, spoken, part, press, pressed}: `part` of a limit, `press` for a button.
function content(value) {
  if (value.press) {
    const button = make("button", value.text);
    button.type = "button";
    button.addEventListener("click", value.press);
    button.setAttribute("aria-pressed", value.pressed);
    if (value.spoken) button.setAttribute("aria-label", value.spoken);
    return [button];
  }
  const parts = [];
  if (value.part !== undefined) {
    const meter = make("meter");
    Object.assign(meter, { low: 0.3, high: 0.7, optimum: 0, value: value.part });
    meter.setAttribute("aria-hidden", "true");
    parts.push(meter);
  }
  const text = make("span", value.text, value.tone);
  if (value.spoken) {
    text.setAttribute("aria-hidden", "true");
    parts.push(text, make("span", value.spoken, "sr"));
  } else parts.push(text);
  return parts;
}

function fill(cell, value) {
  const signature = typeof value === "object" ? JSON.stringify(value) : String(value);
  if (cell.shown === signature) return;
  cell.shown = signature;
  const button = cell.firstChild;
  if (value.press && button?.tagName === "BUTTON" && button.textContent === value.text) {
    button.setAttribute("aria-pressed", value.pressed);
    return;
  }
  cell.replaceChildren(...(typeof value === "object" ? content(value) : [String(value)]));
}

function head(columns) {
  const row = make("tr");
  for (const column of columns) {
    const th = make("th", column.title, column.number ? "n" : "");
    th.scope = "col";
    if (column.hint) th.title = column.hint;
    row.append(th);
  }
  const thead = make("thead");
  thead.append(row);
  return thead;
}

function newRow(columns) {
  const row = make("tr");
  for (const column of columns) {
    const cell = make(column.header ? "th" : "td");
    if (column.header) cell.scope = "row";
    cell.className = [column.number ? "n" : "", column.mono ? "mono" : "", column.wide ? "wide" : ""].join(" ").trim();
    row.append(cell);
  }
  return row;
}

// Of a long table only the rows on the screen exist, between two rows that are as high as the others together.
const VIRTUAL = 200, BEYOND = 12;

function pad(body, index, height) {
  const row = body.rows[index];
  row.firstChild.style.height = `${height}px`;
  row.hidden = height === 0;
}

function newPad(columns) {
  const row = make("tr", undefined, "pad"), cell = make("td");
  cell.colSpan = columns.length;
  row.setAttribute("aria-hidden", "true");
  row.append(cell);
  return row;
}

function virtual(element, columns, rows) {
  const body = element.tBodies[0], box = element.parentElement, tall = body.rows[1]?.offsetHeight || 24;
  const first = Math.max(0, Math.min(rows.length - 1, Math.floor(box.scrollTop / tall)) - BEYOND);
  const shown = rows.slice(first, first + Math.ceil((box.clientHeight || 600) / tall) + 2 * BEYOND);
  if (!body.rows[0]?.classList.contains("pad")) body.replaceChildren(newPad(columns), newPad(columns));
  while (body.rows.length > shown.length + 2) body.rows[body.rows.length - 2].remove();
  while (body.rows.length < shown.length + 2) body.lastChild.before(newRow(columns));
  shown.forEach((make, index) => {
    const row = body.rows[index + 1];
    row.setAttribute("aria-rowindex", first + index + 2);
    make().forEach((value, place) => fill(row.cells[place], value));
  });
  const height = body.rows[1].offsetHeight || tall;  // at first the rows above were not there to be measured
  pad(body, 0, first * height);
  pad(body, body.rows.length - 1, (rows.length - first - shown.length) * height);
}

// A row is a list of values, or a function that returns it.
export function table(id, columns, rows, emptyText) {
  const element = $(id), empty = element.parentElement.nextElementSibling, long = rows.length > VIRTUAL;
  element.parentElement.classList.toggle("tall", long);
  element.parentElement.onscroll = long ? () => virtual(element, columns, rows) : null;
  element.parentElement.hidden = !rows.length;
  empty.hidden = rows.length > 0;
  if (!rows.length) { setText(empty, emptyText); return; }
  const titles = JSON.stringify(columns.map(column => column.title));
  if (element.titles !== titles) {
    element.titles = titles;
    element.replaceChildren(head(columns), make("tbody"));
  }
  if (long) {
    element.setAttribute("aria-rowcount", rows.length + 1);
    virtual(element, columns, rows);
    return;
  }
  const body = element.tBodies[0];
  element.removeAttribute("aria-rowcount");
  if (body.rows[0]?.classList.contains("pad")) body.replaceChildren();
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((values, index) => {
    const row = body.rows[index] ?? body.appendChild(newRow(columns));
    (typeof values === "function" ? values() : values).forEach((value, place) => fill(row.cells[place], value));
  });
}

export function list(id, lines) {
  const element = $(id);
  while (element.children.length > lines.length) element.lastChild.remove();
  lines.forEach((line, index) => setText(element.children[index] ?? element.appendChild(make("li")), line));
}
