for (const table of document.querySelectorAll('table.sortable')) {
  table.querySelectorAll('thead th').forEach((head, column) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'descending' ? 1 : -1, body = table.tBodies[0];
      const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const compare = (a, b) => isNaN(a) || isNaN(b) || a === '' || b === '' ? a.localeCompare(b) : a - b;
      [...body.rows].sort((a, b) => down * compare(key(a), key(b))).forEach(row => body.append(row));
      table.querySelectorAll('thead th').forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', down < 0 ? 'descending' : 'ascending');
    });
  });
}