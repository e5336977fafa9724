// A table that is wider than its place says that it scrolls
function tell() {
  for (const box of document.querySelectorAll('article table, article .table-wrapper'))
    box.classList.toggle('scrolls', box.scrollWidth>box.clientWidth+1)
}
addEventListener('load', tell)
addEventListener('resize', tell)
