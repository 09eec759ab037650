// Tables on narrow screens. One that does not fit becomes a list: a block for each row, a line for each column, with the
// column of NNX first. Code in a table breaks after a dot, a comma or an opening parenthesis, never inside a name.

const tables = document.querySelectorAll(".md-typeset table:not([class])");

for (const table of tables) {
  const titles = [...table.querySelectorAll("thead th")].map(cell => cell.textContent);
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, column) => { cell.dataset.title = titles[column] ?? ""; });
  }
  for (const code of table.querySelectorAll("code")) {
    for (const text of [...code.childNodes].filter(node => node.nodeType === Node.TEXT_NODE)) {
      const parts = text.data.split(/(?<=[.,/=])(?=\S{3})|(?<=\()(?=.{9})/);
      text.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    }
  }
}

function fit() {
  for (const table of tables) {
    delete table.dataset.stacked;
    if (table.scrollWidth > table.closest("article").clientWidth) table.dataset.stacked = "";
  }
}

addEventListener("load", fit);
addEventListener("resize", fit);
