// Answers to what the page shows: kept in the browser, saved as answers.csv
const place = 'selback ' + document.body.dataset.folder
const stamps = JSON.parse(document.getElementById('files').textContent) // of each file in the folder, by its name
const figures = [...document.querySelectorAll('figure[data-kind]')]
const choices = { // of each kind of figure: what its buttons say, with their keys
  suspect: [['right', 'r'], ['unsure', 'u'], ['delete', 'd'], ['change', 'c']],
  pair: [['keep left', 'l'], ['keep right', 'r'], ['keep both', 'b']],
  odd: [['keep', 'r'], ['delete', 'd']],
}
let answers = {} // by figure: the answer, and of a suspect its label; those on earlier pages of the folder, too
let current = -1

const pictures = figure => [...figure.querySelectorAll('[data-file]')]
const files = figure => pictures(figure).map(o => o.dataset.file)
const nameOf = figure => JSON.stringify([figure.dataset.kind, ...files(figure).map(file => [file, stamps[file]])])

// What was kept; in a folder that was made of answers at first these
function load() {
  const given = JSON.parse(document.getElementById('given').textContent)
  for (const [file, stamp, label] of given) answers[JSON.stringify(['suspect', [file, stamp]])] = ['right', label]
  try { answers = JSON.parse(localStorage.getItem(place)) || answers } catch { /* it keeps nothing */ }
}

function keep() {
  try { localStorage.setItem(place, JSON.stringify(answers)) }
  catch { document.getElementById('lost').hidden = false }
}

// Are all of its images there, and still the same?
const isHere = name => JSON.parse(name).slice(1).every(([file, stamp]) => stamps[file] === stamp)

// Which image goes for which other one: each once, and never the last one of its copies, however pairs contradict
function copiesThatGo() {
  const goesFor = new Map()
  const kept = file => goesFor.has(file) ? kept(goesFor.get(file)) : file
  for (const name of Object.keys(answers).filter(isHere)) {
    const [said] = answers[name]
    if (said !== 'keep left' && said !== 'keep right') continue
    const [, [left], [right]] = JSON.parse(name)
    const [stays, goes] = said === 'keep left' ? [left, right] : [right, left]
    if (!goesFor.has(goes) && kept(stays) !== goes) goesFor.set(goes, stays)
  }
  return goesFor.keys()
}

// Files, labels, answers: an image that is deleted somewhere is deleted, whatever is said of its label
function rows() {
  const found = new Map()
  const add = (file, label, said) => { if (found.get(file)?.[2] !== 'delete') found.set(file, [file, label, said]) }
  for (const name of Object.keys(answers).filter(isHere)) {
    const [said, label] = answers[name]
    const [, [file]] = JSON.parse(name)
    if (said === 'right' || said === 'change') add(file, label, said)
    if (said === 'unsure' || said === 'delete') add(file, 'unsure', said)
  }
  for (const file of copiesThatGo()) add(file, 'unsure', 'delete')
  return [...found.values()]
}

// A cell of which a spreadsheet runs nothing
function cell(text) {
  if (/^'*[=+\-@\t\r]/.test(text)) text = "'" + text
  return /[",;\n\r\t]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text
}

function save() {
  const lines = [['file', 'label', 'answer'], ...rows()].map(row => row.map(cell).join(','))
  const link = document.createElement('a')
  link.href = URL.createObjectURL(new Blob([lines.join('\n') + '\n'], {type: 'text/csv'}))
  link.download = 'answers.csv'
  link.click()
}

function show() {
  const out = new Set(rows().filter(row => row[2] === 'unsure' || row[2] === 'delete').map(row => row[0]))
  for (const figure of figures) {
    const [said] = answers[nameOf(figure)] || []
    figure.classList.toggle('answered', Boolean(said))
    figure.classList.toggle('current', figure === figures[current])
    for (const button of figure.querySelectorAll('button')) {
      button.setAttribute('aria-pressed', String(button.dataset.answer === said))
    }
    for (const picture of pictures(figure)) picture.classList.toggle('out', out.has(picture.dataset.file))
  }
  const n = figures.filter(figure => nameOf(figure) in answers).length
  const earlier = Object.keys(answers).filter(isHere).length - n
  document.getElementById('count').textContent = `${n} of ${figures.length} answered`
    + (earlier ? `, ${earlier} on an earlier page` : '')
  document.getElementById('save').disabled = !(n + earlier)
}

// A second time takes it back; tells whether there is an answer now
function answer(figure, said, label) {
  const [before, labelBefore] = answers[nameOf(figure)] || []
  const isNew = before !== said || labelBefore !== label
  if (isNew) answers[nameOf(figure)] = label === undefined ? [said] : [said, label]
  else delete answers[nameOf(figure)]
  keep()
  show()
  return isNew
}

function press(figure, said) {
  current = figures.indexOf(figure)
  return answer(figure, said, said === 'change' ? figure.querySelector('select').value : figure.dataset.label)
}

function move(by) {
  current = Math.min(Math.max(current + by, 0), figures.length - 1)
  figures[current].scrollIntoView({block: 'nearest'})
  show()
}

function addMenu(figure, buttons) {
  const menu = document.createElement('select')
  menu.setAttribute('aria-label', 'its class')
  for (const option of document.getElementById('classes').content.children) {
    if (option.value !== figure.dataset.label) menu.append(option.cloneNode(true))
  }
  const [said, label] = answers[nameOf(figure)] || []
  menu.value = said === 'change' ? label : figure.dataset.likelier
  if (menu.selectedIndex < 0) menu.selectedIndex = 0
  menu.onchange = () => {
    current = figures.indexOf(figure)
    answer(figure, 'change', menu.value)
  }
  buttons.append(menu)
}

function addButtons(figure) {
  const buttons = document.createElement('div')
  buttons.className = 'buttons'
  for (const [said, key] of choices[figure.dataset.kind]) {
    const button = document.createElement('button')
    button.textContent = said === 'change' ? 'change to' : said
    button.title = `key: ${key}`
    button.dataset.answer = said
    button.onclick = () => press(figure, said)
    buttons.append(button)
  }
  if (figure.dataset.kind === 'suspect') addMenu(figure, buttons)
  figure.append(buttons)
}

document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === 'SELECT') return
  const step = {ArrowRight: 1, j: 1, ArrowLeft: -1, k: -1}[event.key]
  const figure = figures[current]
  const [said] = figure && choices[figure.dataset.kind].find(([, key]) => key === event.key) || []
  if (step) move(step)
  else if (said && press(figure, said)) move(1)
  else return
  event.preventDefault()
})

load()
figures.forEach(addButtons)
document.getElementById('save').onclick = save
document.getElementById('bar').hidden = !figures.length
show()
