'use strict';
// Draws the worker's status from /api/v1. Every text of the worker enters the page as a text node, never as markup.
(() => {
const $ = id => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';
const WINDOW_MS = 15 * 60 * 1000;
const WINDOW_MIN_MS = 60 * 1000;
const TICK_SECONDS = [15, 30, 60, 120, 300];
const POLL_MS = 2000;
// The page may be served below a path prefix, with or without a trailing slash.
const BASE = location.pathname.replace(/\/?$/, '/');
for (const link of document.querySelectorAll('footer a')) link.href = BASE + link.getAttribute('href');

// --- formatting of numbers

function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return [value.toFixed(digits), units[unit]];
}
const size = value => bytes(value).join(' ');
const rate = value => size(value) + '/s';
const count = value => Math.round(value).toLocaleString('en-US');
// Formats a label of an axis. All labels of the axis have the same unit.
function axisLabel(value, step, most, suffix) {
  let unit = 1;
  while (unit * 1024 <= most) unit *= 1024;
  const digits = step >= unit ? 0 : step * 2 >= unit ? 1 : 2;
  return `${(value / unit).toFixed(digits)} ${bytes(unit)[1]}${suffix}`;
}
function duration(seconds) {
  if (seconds === 0) return '0 s';
  if (seconds < 0.001) return Math.max(1, Math.round(seconds * 1e6)) + ' µs';
  if (seconds < 1) return (seconds * 1000).toPrecision(3).replace(/\.0+$/, '') + ' ms';
  if (seconds < 60) return seconds.toFixed(seconds < 10 && seconds % 1 ? 1 : 0) + ' s';
  if (seconds < 3600) return Math.floor(seconds / 60) + ' min ' + Math.floor(seconds % 60) + ' s';
  if (seconds < 86400) return Math.floor(seconds / 3600) + ' h ' + Math.floor(seconds % 3600 / 60) + ' min';
  return Math.floor(seconds / 86400) + ' d ' + Math.floor(seconds % 86400 / 3600) + ' h';
}
const percent = value => (100 * value).toFixed(value < 0.1 ? 1 : 0) + ' %';
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? '' : 's'}`;

// --- elements

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
function svg(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function text(id, value) {
  const node = $(id);
  if (node.textContent !== value) node.textContent = value;
}
function big(id, value, unit) {
  $(id).replaceChildren(value, unit ? el('small', {}, unit) : '');
}
// The content security policy allows no style attributes, so widths and colours are set as properties.
function coloured(node, colour, width) {
  if (colour) node.style.background = `var(--${colour})`;
  if (width !== undefined) node.style.width = `${Math.min(100, 100 * width)}%`;
  return node;
}
function bar(parts) {
  const node = el('div', { class: 'bar' });
  for (const [share, colour] of parts) node.append(coloured(el('span'), colour, share));
  return node;
}

// --- charts

const COLOURS = { received: 'blue', read: 'teal', flushed: 'amber', data: 'blue', flight: 'amber', reserved: 'grey' };

class Chart {
  constructor(id, series, options) {
    this.root = $(id);
    this.legend = $(id + '-legend');
    this.series = series;
    this.options = options;
    this.points = [];
    this.tip = el('div', { class: 'tip', hidden: '' });
    this.values = series.map(line => {
      const value = el('b');
      this.legend.append(el('li', {}, coloured(el('i'), line.colour), line.name, value));
      return value;
    });
    new ResizeObserver(() => this.draw()).observe(this.root);
    this.root.addEventListener('pointermove', event => this.hover(event.clientX));
    this.root.addEventListener('pointerleave', () => { this.at = undefined; this.draw(); });
  }
  set(points, top) {
    this.points = points;
    this.top = top;
    const last = points[points.length - 1];
    this.series.forEach((line, n) => { this.values[n].textContent = last ? this.options.label(last[line.key]) : ''; });
    this.draw();
  }
  hover(x) {
    const box = this.root.getBoundingClientRect();
    const time = this.start + (x - box.left - this.left) / (box.width - this.left - 8) * this.span;
    let best;
    for (const point of this.points) {
      if (best === undefined || Math.abs(point.t - time) < Math.abs(best.t - time)) best = point;
    }
    this.at = best;
    this.draw();
  }
  draw() {
    const width = this.root.clientWidth, height = this.root.clientHeight;
    if (!width) return;
    const left = this.left = 62, right = 8, top = 8, bottom = 22;
    const end = this.points.length ? this.points[this.points.length - 1].t : Date.now();
    const first = this.points.length ? this.points[0].t : end;
    const span = this.span = Math.min(WINDOW_MS, Math.max(WINDOW_MIN_MS, end - first));
    const start = this.start = end - span;
    const shown = this.points.filter(point => point.t >= start);
    const stacked = this.options.stacked;
    const total = point => this.series.reduce((sum, line) => sum + point[line.key], 0);
    const most = shown.reduce((max, point) =>
      Math.max(max, stacked ? total(point) : Math.max(...this.series.map(line => point[line.key]))), 0);
    const step = niceStep(Math.max(most, this.top || 0, 1024) / 4);
    const max = Math.max(step, Math.ceil(Math.max(most, this.top || 0) / step) * step);
    const x = t => left + (t - start) / span * (width - left - right);
    const y = v => top + (1 - v / max) * (height - top - bottom);
    const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': this.options.title });
    for (let v = 0; v <= max * 1.001; v += step) {
      root.append(svg('line', { x1: left, x2: width - right, y1: y(v), y2: y(v), class: v === 0 ? 'axis' : 'grid' }));
      root.append(svg('text', { x: left - 8, y: y(v) + 4, 'text-anchor': 'end' }, v === 0 ? '0' : axisLabel(v, step, max, this.options.suffix)));
    }
    const tick = TICK_SECONDS.find(seconds => seconds * 4000 >= span) || span / 4000;
    for (let ago = 0; ago * 1000 <= span; ago += tick) {
      const label = ago === 0 ? 'now' : '−' + duration(ago).replace(/ 0 s$/, '');
      root.append(svg('text', { x: x(end - ago * 1000), y: height - 4, 'text-anchor': ago === 0 ? 'end' : 'middle' }, label));
    }
    if (shown.length > 1) this.lines(root, shown, x, y, stacked);
    if (this.options.limit && this.top) {
      const line = { x1: left, x2: width - right, y1: y(this.top), y2: y(this.top) };
      root.append(svg('line', { ...line, stroke: 'var(--red)', 'stroke-dasharray': '5 4', 'stroke-opacity': 0.8 }));
      root.append(svg('text', { x: width - right, y: y(this.top) + 14, 'text-anchor': 'end' }, 'capacity'));
    }
    this.root.replaceChildren(root, this.tip);
    this.showTip(root, x, y, width, height - bottom);
  }
  lines(root, shown, x, y, stacked) {
    const below = shown.map(() => 0);
    const strokes = [];
    for (const line of this.series) {
      const heights = shown.map((point, n) => point[line.key] + (stacked ? below[n] : 0));
      const path = heights.map((v, n) => `${n ? 'L' : 'M'}${x(shown[n].t).toFixed(1)} ${y(v).toFixed(1)}`).join('');
      const colour = `var(--${line.colour})`;
      const floor = stacked
        ? shown.map((point, n) => `L${x(point.t).toFixed(1)} ${y(below[n]).toFixed(1)}`).reverse().join('')
        : `L${x(shown[shown.length - 1].t).toFixed(1)} ${y(0)}L${x(shown[0].t).toFixed(1)} ${y(0)}`;
      const fill = { fill: colour, 'fill-opacity': stacked ? 0.28 : 0.07, stroke: 'none' };
      root.append(svg('path', { d: path + floor + 'Z', ...fill }));
      strokes.unshift(svg('path', { d: path, fill: 'none', stroke: colour, 'stroke-width': 1.8, 'stroke-linejoin': 'round', class: 'series' }));
      if (stacked) heights.forEach((v, n) => { below[n] = v; });
    }
    // Draws the first series on top. Where another series is zero, its stacked line would otherwise cover the first one.
    root.append(...strokes);
  }
  showTip(root, x, y, width, floor) {
    this.tip.hidden = !this.at || this.at.t < this.start;
    if (this.tip.hidden) return;
    const at = x(this.at.t);
    root.append(svg('line', { x1: at, x2: at, y1: 4, y2: floor, class: 'cross' }));
    const time = new Date(this.at.t).toLocaleTimeString();
    const line = it => el('div', {}, coloured(el('i'), it.colour), it.name, el('b', {}, this.options.label(this.at[it.key])));
    this.tip.replaceChildren(el('div', {}, time), ...this.series.map(line));
    const side = at > width / 2;
    this.tip.style.left = side ? '' : `${at + 10}px`;
    this.tip.style.right = side ? `${width - at + 10}px` : '';
  }
}
function niceStep(value) {
  let unit = 1;
  while (value > 1024) { value /= 1024; unit *= 1024; }
  return unit * ([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].find(step => step >= value) || 1024);
}
const throughput = new Chart('throughput', [
  { key: 'received', name: 'received', colour: COLOURS.received },
  { key: 'read', name: 'read', colour: COLOURS.read },
  { key: 'flushed', name: 'flushed', colour: COLOURS.flushed },
], { label: rate, suffix: '/s', title: 'Bytes per second received, read and flushed' });
const memoryChart = new Chart('memory', [
  { key: 'data', name: 'stored', colour: COLOURS.data },
  { key: 'flight', name: 'being flushed', colour: COLOURS.flight },
  { key: 'reserved', name: 'reserved', colour: COLOURS.reserved },
], { label: size, suffix: '', title: 'Memory in use', stacked: true, limit: true });

// --- samples → points

let samples = [];
function takeSamples(fresh) {
  samples = samples.concat(fresh);
  const from = (samples.length ? samples[samples.length - 1].at_ms : 0) - WINDOW_MS - 10000;
  samples = samples.filter(sample => sample.at_ms >= from);
}
function drawCharts(capacity) {
  const rates = [], fills = [];
  samples.forEach((sample, n) => {
    const data = sample.memory_used_bytes - sample.memory_reserved_bytes - sample.memory_in_flight_bytes;
    fills.push({ t: sample.at_ms, data: Math.max(0, data), flight: sample.memory_in_flight_bytes, reserved: sample.memory_reserved_bytes });
    const before = samples[n - 1];
    const seconds = before ? (sample.at_ms - before.at_ms) / 1000 : 0;
    if (seconds <= 0) return;
    const per = key => Math.max(0, (sample[key] - before[key]) / seconds);
    rates.push({ t: sample.at_ms, received: per('received_bytes'), read: per('read_bytes'), flushed: per('flushed_bytes') });
  });
  throughput.set(rates, 0);
  memoryChart.set(fills, capacity);
  const now = rates[rates.length - 1];
  if (now) {
    const [inValue, inUnit] = bytes(now.received), [outValue, outUnit] = bytes(now.read);
    big('t-in', inValue, inUnit + '/s');
    big('t-out', outValue, outUnit + '/s');
  }
}

// --- the parts of the page

const KINDS = { active: 'good', unhealthy: 'bad', decommissioning: 'warn', decommissioned: 'warn', stopping: 'warn' };

function showNode(status) {
  const { node, memory, flush, tickets, apps } = status;
  text('node-id', node.id);
  const ports = [`gRPC ${node.grpc_port}`, node.tcp_port ? `TCP ${node.tcp_port}` : '', `HTTP ${node.http_port}`];
  text('node-sub', [node.store_type, ...ports, ...node.tags].filter(Boolean).join(' · '));
  $('state').dataset.kind = KINDS[node.state] || 'warn';
  text('state-text', node.state);
  text('updated', `up ${duration(node.uptime_seconds)}`);
  text('version', `uniffle-worker ${node.version} (${node.commit})`);
  document.title = `${node.state === 'active' ? '' : node.state + ' · '}${node.id}`;

  const used = memory.used_bytes / memory.capacity_bytes;
  big('t-memory', percent(used).replace(' %', ''), '%');
  const data = memory.used_bytes - memory.reserved_bytes - memory.in_flight_bytes;
  const parts = [[data, 'blue'], [memory.in_flight_bytes, 'amber'], [memory.reserved_bytes, 'grey']];
  $('t-memory-bar').replaceChildren(...bar(parts.map(([b, c]) => [Math.max(0, b) / memory.capacity_bytes, c])).children);
  text('t-memory-sub', `${size(memory.used_bytes)} of ${size(memory.capacity_bytes)}, heap ${size(memory.heap_used_bytes)} of ${size(memory.heap_capacity_bytes)}`);
  text('t-in-sub', `${size(status.totals.received_bytes)} since start`);
  text('t-out-sub', `${size(status.totals.read_bytes)} since start`);
  big('t-apps', count(apps.count));
  text('t-apps-sub', plural(apps.partitions, 'partition') + (apps.huge_partitions ? `, ${apps.huge_partitions} huge` : ''));
  big('t-flush', count(flush.unfinished_batches), flush.unfinished_batches === 1 ? 'batch' : 'batches');
  text('t-flush-sub', flush.failed_writes ? `${count(flush.failed_writes)} failed writes` : `${size(flush.in_flight_bytes)} in progress`);
  big('t-tickets', count(tickets.outstanding));
  const refused = tickets.refused_memory + tickets.refused_partition;
  text('t-tickets-sub', refused ? `${count(refused)} refused since start` : `${size(tickets.reserved_bytes)} reserved`);
}

const quotaUse = it => [it.used, it.max].map(it.quota.endsWith('_disk') ? size : count).join(' of ');
function showAlarms(status) {
  const alarms = [];
  const sick = status.disks.filter(disk => ['read_only', 'detached', 'hung', 'broken'].includes(disk.condition));
  if (sick.length) alarms.push(`${plural(sick.length, 'disk')} of ${status.disks.length} failed`);
  const full = status.disks.filter(disk => disk.condition === 'full');
  if (status.disks.length && full.length === status.disks.length) alarms.push('all disks are full');
  const down = status.coordinators.filter(it => it.link === 'down');
  if (down.length) alarms.push(`${plural(down.length, 'coordinator')} of ${status.coordinators.length} unreachable`);
  if (status.apps.lost_blocks) alarms.push(`${plural(status.apps.lost_blocks, 'block')} lost`);
  const { shuffles, reasons, unknown_shuffles: unknown } = status.incomplete;
  if (shuffles) alarms.push(`results of ${plural(shuffles, 'shuffle')} refused: ${reasons.join('; ')}`);
  else if (unknown) alarms.push(`results of unknown shuffles refused: ${unknown}`);
  for (const it of status.quotas) {
    if (it.used >= 0.9 * it.max) alarms.push(`${it.quota}: ${it.by} uses ${quotaUse(it)}`);
  }
  if (status.process.panics) alarms.push(`${plural(status.process.panics, 'panic')} since start; see the log`);
  if (status.node.not_ready) alarms.push(`refuses new shuffles: ${status.node.not_ready}`);
  $('alarm').hidden = alarms.length === 0;
  text('alarm', alarms.join(' · '));
}

const MEMORY_ONLY = 'This worker keeps data in memory only.';
const STORES = { HDFS: 'HDFS', OBJECT: 'the object store' };
const CONDITIONS = { healthy: ['good', 'healthy'], full: ['warn', 'full'], read_only: ['warn', 'read-only'], detached: ['bad', 'unmounted or replaced'], hung: ['bad', 'hung'], broken: ['bad', 'broken'] };

function storageCard(name, kind, word, ...parts) {
  const pill = el('span', { class: 'pill', 'data-kind': kind }, el('i'), word);
  return el('article', { class: 'disk' }, el('header', {}, el('code', {}, name), pill), ...parts);
}
function hdfsCard({ stores, failing_stores: failing, written_bytes: written }) {
  const [kind, word] = failing ? ['bad', `${failing} of ${stores} fail`] : stores ? ['good', 'healthy'] : ['wait', 'not in use'];
  const note = stores ? `${size(written)} written to ${plural(stores, 'remote store')}` : 'Applications choose the path in spark.rss.remote.storage.path.';
  return storageCard('HDFS', kind, word, el('p', { class: 'sub' }, note));
}
function objectCard(store) {
  const { cache_used_bytes: used, cache_capacity_bytes: capacity, cache_hits: hits, cache_misses: misses } = store;
  const asked = hits + misses;
  const cache = capacity ? `, read cache ${size(used)} of ${size(capacity)}${asked ? `, ${percent(hits / asked)} hits` : ''}` : '';
  return storageCard('object store', store.is_failing ? 'bad' : 'good', store.is_failing ? 'fails' : 'healthy',
    capacity ? bar([[used / capacity, 'blue']]) : null, el('p', { class: 'sub' }, `${size(store.stored_bytes)} stored${cache}`));
}
function showDisks({ disks, object_store: store, hdfs, node }) {
  $('disks-empty').hidden = disks.length > 0;
  const below = Object.keys(STORES).find(it => node.store_type.includes(it));
  text('disks-empty', below ? `This worker has no data directory. It flushes memory to ${STORES[below]}.` : MEMORY_ONLY);
  const total = disks.reduce((sum, disk) => sum + disk.used_bytes, 0);
  const parts = disks.length ? [`${size(total)} of shuffle data on ${plural(disks.length, 'disk')}`] : [];
  text('disks-sub', parts.join(', '));
  $('disks').replaceChildren(...disks.map(disk => {
    const [kind, word] = CONDITIONS[disk.condition] || ['warn', disk.condition];
    const others = Math.max(0, disk.total_bytes - disk.free_bytes - disk.used_bytes);
    const share = value => disk.total_bytes ? value / disk.total_bytes : 0;
    const failures = disk.failures ? `, ${plural(disk.failures, 'failure')}` : '';
    return storageCard(disk.path, kind, word,
      bar([[share(disk.used_bytes), 'blue'], [share(others), 'grey']]),
      el('p', { class: 'sub' }, `${size(disk.used_bytes)} used by this worker, ${size(disk.free_bytes)} free of ${size(disk.total_bytes)}${failures}`),
      disk.fault ? el('p', { class: 'bad' }, disk.fault) : null);
  }), ...(hdfs ? [hdfsCard(hdfs)] : []), ...(store ? [objectCard(store)] : []));
}

function cell(label, value, attributes) {
  return el('td', { 'data-label': label, class: 'n', ...attributes }, value);
}
function appCell(app, detail, where = 'app') {
  const button = el('button', { class: 'link' }, app);
  button.addEventListener('click', () => { location.hash = `#${where}/` + encodeURIComponent(app); });
  return el('td', { class: 'app' }, button, detail ? el('small', {}, detail) : null);
}
function showApps(answer) {
  $('apps').hidden = answer.apps.length === 0;
  $('apps-empty').hidden = answer.apps.length > 0;
  text('apps-sub', answer.apps.length < answer.count ? `the ${answer.apps.length} largest of ${answer.count}` : '');
  const lost = n => cell('Lost', n ? count(n) : '–', n ? { class: 'n bad' } : {});
  $('apps').tBodies[0].replaceChildren(...answer.apps.map(app => el('tr', {},
    appCell(app.app, app.user),
    cell('Age', duration(app.age_seconds), { class: '' }),
    cell('Received', size(app.received_bytes)),
    cell('In memory', size(app.in_memory_bytes)),
    cell('On disk', size(app.local_bytes)),
    cell('Partitions', count(app.partitions)),
    cell('Largest', size(app.largest_partition_bytes)),
    cell('Skew', app.skew ? app.skew.toFixed(1) + ' ×' : '–', app.skew >= 10 ? { class: 'n warn' } : {}),
    lost(app.lost_blocks))));
  $('gone').hidden = answer.gone.length === 0;
  $('gone-apps').tBodies[0].replaceChildren(...answer.gone.map(app => el('tr', {},
    appCell(app.app, app.user),
    cell('Ended as', app.presence, { class: '' }),
    cell('Age', duration(app.age_seconds), { class: '' }),
    cell('Received', size(app.received_bytes)),
    lost(app.lost_blocks))));
}

const LINKS = { up: 'green', down: 'red', untried: 'grey', embedded: 'green' };

function showRest(status) {
  $('coordinators').replaceChildren(...status.coordinators.map(it => {
    const dot = coloured(el('span', { class: 'dot' }), LINKS[it.link] || 'grey');
    const detail = it.reason ? `${it.link}: ${it.reason}` : it.link === 'embedded' ? 'embedded in this worker' : it.link;
    return el('li', {}, dot, el('div', {}, it.address, el('small', { class: 'sub' }, ` ${detail}`)));
  }));
  const { connections, process, memory } = status;
  const facts = [
    ['gRPC', count(connections.grpc)], ['Raw TCP', count(connections.tcp)], ['HTTP', count(connections.http)],
    ['Resident memory', size(process.resident_bytes)], ['Threads', count(process.threads)], ['CPU time', duration(process.cpu_seconds)],
    ['Open files', count(process.open_files)], ['Blocks in memory', count(memory.blocks)],
    ['Spills at', `${percent(memory.high_watermark)}, to ${percent(memory.low_watermark)}`],
    ...status.quotas.map(it => [it.quota, `${quotaUse(it)}${it.by ? ` by ${it.by}` : ''}${it.refused ? `, ${count(it.refused)} refused` : ''}`]),
  ];
  $('facts').replaceChildren(...facts.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))));
}

// Rate at which a node receives bytes, or undefined if unknown. The node's figures change once per heartbeat.
const heard = new Map();
function receiving(node) {
  const at = Date.now() / 1000 - node.silent_seconds, before = heard.get(node.id);
  if (before && at - before.at < 0.5) return before.rate;
  const grown = before ? node.received_bytes - before.bytes : -1;
  // The sum shrinks when an application ends.
  const rate = grown < 0 ? undefined : grown / (at - before.at);
  heard.set(node.id, { at, bytes: node.received_bytes, rate });
  return rate;
}
function nodeName(node) {
  if (!node.http_port) return node.id;
  const host = node.ip.includes(':') ? `[${node.ip}]` : node.ip;
  return el('a', { href: `${location.protocol}//${host}:${node.http_port}/` }, node.id);
}

// Shows the cluster as this worker's embedded coordinator knows it. Hidden without a coordinator, or with a single node.
const CLUSTER_ROWS = 100;
async function showCluster(status) {
  const has = status.coordinators.some(it => it.link === 'embedded');
  const cluster = has ? await get('cluster') : { nodes: [], lost: [] };
  $('cluster').hidden = cluster.nodes.length + cluster.lost.length < 2;
  if ($('cluster').hidden) return;
  const states = new Map();
  for (const node of cluster.nodes) states.set(node.state, (states.get(node.state) || 0) + 1);
  if (cluster.lost.length) states.set('lost', cluster.lost.length);
  text('cluster-sub', [...states].map(([state, n]) => `${n} ${state}`).join(', '));
  const out = n => cell('Disks out', n ? count(n) : '–', n ? { class: 'n bad' } : {});
  const rates = new Map(cluster.nodes.map(node => [node.id, receiving(node)]));
  $('cluster-nodes').tBodies[0].replaceChildren(...cluster.nodes.slice(0, CLUSTER_ROWS).map(node => el('tr', {},
    el('td', { class: 'app' }, nodeName(node), el('small', {}, `${node.ip}:${node.http_port}`)),
    cell('State', el('span', { class: 'pill', 'data-kind': KINDS[node.state] || 'warn' }, el('i'), node.state), { class: '' }),
    cell('Memory', size(node.used_bytes)),
    cell('Memory share', percent(node.used_bytes / Math.max(1, node.used_bytes + node.available_bytes))),
    cell('Receiving', rates.get(node.id) === undefined ? '–' : rate(rates.get(node.id))),
    cell('Disks used', node.disks_used_bytes === null ? '–' : size(node.disks_used_bytes)),
    out(node.disks.filter(disk => disk.condition !== 'normal').length),
    cell('Applications', count(node.apps)),
    cell('Last heartbeat', duration(Math.round(node.silent_seconds))))), ...cluster.lost.slice(0, CLUSTER_ROWS).map(id => el('tr', {},
    el('td', { class: 'app' }, id),
    cell('State', el('span', { class: 'pill', 'data-kind': 'bad' }, el('i'), 'lost'), { class: '' }))));
  $('cluster-more').hidden = cluster.apps.length === 0;
  $('cluster-apps').tBodies[0].replaceChildren(...cluster.apps.slice(0, CLUSTER_ROWS).map(app => el('tr', {},
    appCell(app.app, '', 'cluster'),
    cell('Nodes', count(app.nodes.length)),
    cell('Received', size(app.total_bytes)),
    cell('In memory', size(app.in_memory_bytes)),
    cell('On disk', size(app.local_bytes)))));
}

// --- one application

const STAGE_WORDS = {
  ticket_wait: ['Waiting for memory', 'from a refused ticket to the next granted one'],
  partition_wait: ['Waiting for a huge partition', 'its share of memory is full'],
  receive: ['Receiving', 'sends, mostly network time'],
  flush_queue: ['Waiting for a flush worker', 'sealed batches in the queue'],
  flush_write: ['Flushing', 'writing and publishing batches'],
  disk_read: ['Reading disks', 'index and data for readers'],
  answer: ['Answering', 'sending data to readers'],
};
function showExplanation(it) {
  const calm = it.findings.length === 1 && it.findings[0].startsWith('no findings');
  const longest = Math.max(...it.stages.map(stage => stage.total_seconds), 1e-9);
  const share = (colour, part) => part > 0 ? coloured(el('span', { class: 'share' }), colour, part) : null;
  const time = (stage, seconds) => el('td', { class: 'n' }, stage.count || seconds ? duration(seconds) : '–');
  const row = stage => {
    const [name, what] = STAGE_WORDS[stage.stage] || [stage.stage, ''];
    return el('tr', {},
      el('td', {}, name, el('small', {}, what), share('blue', stage.total_seconds / longest)),
      el('td', { class: 'n' }, count(stage.count)), time(stage, stage.total_seconds), time(stage, stage.median_seconds),
      time(stage, stage.p99_seconds), time(stage, stage.longest_seconds));
  };
  const head = names => el('thead', {}, el('tr', {}, ...names.map((name, n) => el('th', n ? { class: 'n' } : {}, name))));
  const facts = pairs => el('dl', { class: 'facts' }, ...pairs.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))));
  const { bytes: b, retries: r } = it;
  // Names the worker of an item in an explanation over several workers.
  const of = item => item.worker ? el('small', {}, item.worker) : null;
  const at = it.workers ? [el('h3', {}, `At ${plural(it.worker_count, 'worker')}`),
    el('table', { class: 'rows' }, head(['Worker', 'Received', 'In memory', 'On disks', 'Refused', 'Flushing', 'Reading']), el('tbody', {}, ...it.workers.slice(0, CLUSTER_ROWS).map(worker => el('tr', {},
      el('td', { class: 'app' }, worker.worker, el('small', {}, worker.presence)),
      cell('Received', size(worker.received)), cell('In memory', size(worker.in_memory)), cell('On disks', size(worker.on_local_disks)),
      cell('Refused', count(worker.tickets_refused_memory)),
      cell('Flushing', duration(worker.flush_write_seconds)), cell('Reading', duration(worker.disk_read_seconds)))))),
    ...it.unanswered.slice(0, CLUSTER_ROWS).map(silent => el('p', { class: 'bad' }, `${silent.worker}: ${silent.reason}`))] : [];
  const parts = [
    el('ul', { class: 'findings' }, ...it.findings.map(finding => el('li', calm ? { class: 'calm' } : {}, finding))),
    facts([['State', it.presence], ['Age', duration(it.age_seconds)], ['User', it.user || '–'], ['Received', size(b.received)],
      ['In memory', size(b.in_memory)], ['Peak in memory', size(b.in_memory_peak)], ['Mean time in memory', duration(b.mean_seconds_in_memory)],
      ['On disks', size(b.on_local_disks)], ...(b.in_object_store ? [['In the object store', size(b.in_object_store)]] : []), ['Read from memory', size(b.read_from_memory)], ['Read from disks', size(b.read_from_disks)]]),
    ...at,
    el('h3', {}, 'Time'),
    el('table', { class: 'stages' }, head(['Stage', 'Count', 'Total', 'Median', '99 %', 'Longest']), el('tbody', {}, ...it.stages.map(row))),
    el('p', { class: 'sub' }, 'Tasks run in parallel, so totals can exceed the age of the application.'),
    el('h3', {}, 'Retries'),
    facts([['Tickets granted', count(r.tickets_granted)], ['Refused: memory full', count(r.tickets_refused_memory)],
      ['Refused: huge partition', count(r.tickets_refused_partition)], ['Sends failed', count(r.sends_failed)],
      ['Duplicate blocks', `${count(r.duplicate_blocks)} (${size(r.duplicate_bytes)})`], ['Batches retried', count(r.flushes_retried)]]),
  ];
  if (it.quotas.length) {
    parts.push(el('h3', {}, 'Quotas'), facts(it.quotas.map(quota => [quota.worker ? `${quota.quota} (${quota.worker})` : quota.quota, `${quotaUse(quota)}${quota.refused ? `, ${count(quota.refused)} refused` : ''}`])));
  }
  if (it.top_partitions.length) {
    const most = Math.max(...it.top_partitions.map(partition => partition.received_bytes), 1);
    parts.push(el('h3', {}, `Largest of ${plural(it.partitions, 'partition')}, skew ${it.skew.toFixed(1)} ×`),
      el('table', {}, head(['Shuffle / partition', 'Received', 'In memory']), el('tbody', {}, ...it.top_partitions.map(partition => el('tr', {},
        el('td', {}, `${partition.shuffle} / ${partition.partition}`, of(partition), share('teal', partition.received_bytes / most)),
        el('td', { class: 'n' }, size(partition.received_bytes)), el('td', { class: 'n' }, size(partition.in_memory_bytes)))))));
  }
  if (it.losses.length) {
    parts.push(el('h3', { class: 'bad' }, 'Lost blocks'),
      el('table', {}, head(['Shuffle / partition', 'Blocks', 'Reason']), el('tbody', {}, ...it.losses.map(loss => el('tr', {},
        el('td', {}, `${loss.shuffle} / ${loss.partition}`, of(loss)), el('td', { class: 'n' }, count(loss.blocks)),
        el('td', {}, loss.reason))))));
  }
  $('explain-body').replaceChildren(...parts);
}

// --- the loop

async function get(path) {
  const answer = await fetch(`${BASE}api/v1/${path}`, { cache: 'no-store', signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
function wanted() {
  const match = /^#(app|cluster)\/(.+)$/.exec(location.hash);
  try { return match && { app: decodeURIComponent(match[2]), path: match[1] === 'cluster' ? 'cluster/apps' : 'apps' }; } catch { return null; }
}
async function explain() {
  const now = wanted(), dialog = $('explain'), asked = location.hash;
  if (!now) { if (dialog.open) dialog.close(); return; }
  text('explain-title', now.app);
  try {
    const answer = await get(`${now.path}/${encodeURIComponent(now.app)}/explain`);
    if (location.hash === asked) showExplanation(answer);
  } catch {
    $('explain-body').replaceChildren(el('p', { class: 'empty' }, `${now.path === 'apps' ? 'This worker does' : 'The workers do'} not know the application (any more).`));
  }
  if (!dialog.open && location.hash === asked) dialog.showModal();
}
let turn = 0;
async function poll() {
  try {
    const last = samples.length ? samples[samples.length - 1].at_ms : 0;
    const [status, history] = await Promise.all([get('status'), get(`history?after_ms=${last}`)]);
    takeSamples(history.samples);
    showNode(status); showAlarms(status); showDisks(status); showRest(status); text('spark-options', status.spark_options);
    drawCharts(status.memory.capacity_bytes);
    if (turn++ % 2 === 0) { showApps(await get('apps?limit=50')); await showCluster(status); if (wanted()) await explain(); }
    document.querySelector('main').classList.remove('stale');
  } catch (error) {
    $('state').dataset.kind = 'bad';
    text('state-text', 'no answer');
    $('alarm').hidden = false;
    text('alarm', `The worker does not respond: ${error.message}`);
    document.querySelector('main').classList.add('stale');
  }
  document.documentElement.dataset.polls = turn;
}
async function loop() {
  if (!document.hidden) await poll();
  setTimeout(loop, POLL_MS);
}
document.addEventListener('visibilitychange', () => { if (!document.hidden) poll(); });
window.addEventListener('hashchange', explain);
$('explain').addEventListener('close', () => { if (location.hash) history.replaceState(null, '', location.pathname); });
$('explain-close').addEventListener('click', () => $('explain').close());
$('explain').addEventListener('click', event => { if (event.target === $('explain')) $('explain').close(); });
loop();
})();
