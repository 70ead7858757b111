// Evaluates an estimate from its coefficients; the same arithmetic as harness/planning, in its order.

function peak(memory, b, s) {
  const values = [1, b, s, b * s, s * s, b * s * s];
  const bytes = (p) => p.reduce((sum, c, i) => sum + c * values[i], 0);
  let most = -1, moment = null;
  for (const [name, candidate] of b === 1 ? memory.one : memory.more) {
    const count = Math.min(...candidate.map(bytes));
    if (count > most) { most = count; moment = name; }
  }
  return { bytes: most, moment };
}

function computing(data, row, b, s) {
  const c = row.speed.computing, t = b * s;
  const affine = (pair) => pair[0] + pair[1] * t;
  const products = affine(c.products);
  const again = c.recomputed * (products - affine(c.last));
  const causal = Math.min(1, (1 + data.causal_tile / s) / 2);
  const fused = c.attention * t * causal * (s + c.attention_half_length);
  let forward = products + fused + c.eager_forward * t * s + c.forward * t;
  let backward = 2 * products + data.attention_backward * fused + c.eager_backward * t * s + c.backward * t;
  forward = Math.max(forward, c.least_forward);
  backward = Math.max(backward, c.least_backward);
  backward += again + c.recomputed * (forward - products);
  const head = affine(c.head), loss = c.loss * t;
  return {
    blockForward: forward, blockBackward: backward + c.kept,
    headForward: head + loss / 3, headBackward: 2 * head + (2 * loss) / 3,
    microStep: forward + backward + c.kept + 3 * head + loss,
    update: c.update,
  };
}

function runTime(stages, ahead, beside) {
  let computed = 0, network = 0, begun = 0, waiting = 0;
  for (const [compute, gather, reduce] of stages) {
    let arrived = 0;
    if (gather) {
      network = Math.max(network, ahead ? begun : computed) + gather;
      arrived = network;
    }
    if (waiting) {
      network = Math.max(network, computed) + waiting;
      waiting = 0;
      if (!beside) arrived = Math.max(arrived, network);
    }
    begun = Math.max(computed, arrived);
    computed = begun + compute;
    waiting = reduce;
  }
  return waiting ? Math.max(computed, Math.max(network, computed) + waiting) : Math.max(computed, network);
}

function stages(speed, c, forward, backward, reduced) {
  const { root, blocks, early } = speed;
  const each = 1 / Math.max(1, blocks.length);
  const found = [[0, root * forward, 0]];
  for (const share of blocks) found.push([c.blockForward * each, share * forward, 0]);
  found.push([c.headForward, 0, 0]);
  if (!blocks.length) found.push([c.blockForward, 0, 0]);
  found.push([c.headBackward, root * backward, early * reduced]);
  for (const share of [...blocks].reverse()) {
    found.push([c.blockBackward * each, share * backward, share * reduced]);
  }
  if (!blocks.length) found.push([c.blockBackward, 0, 0]);
  found.push([0, 0, (root - early) * reduced]);
  return found;
}

function exposed(row, c) {
  const speed = row.speed, sent = speed.collectives, count = row.steps;
  const microStep = (first, last) => Math.max(0, runTime(stages(
    speed, c,
    first || sent.gathers_each ? sent.forward : 0, sent.backward,
    last || sent.reduces_each ? sent.reduced : 0,
  ), speed.gathers_ahead, speed.reduces_beside) - c.microStep);
  if (!speed.communicates) return 0;
  if (count === 1) return sent.always + microStep(true, true);
  const ends = microStep(true, false) + microStep(false, true);
  return sent.always + ends + (count > 2 ? (count - 2) * microStep(false, false) : 0);
}

function evaluate(data, label, size, b, s) {
  const row = data.rows[label][size];
  if (row.unsupported) return { label, unsupported: row.unsupported };
  const found = { label, sent: row.sent_bytes, between: row.between_bytes };
  if (row.memory) {
    const { bytes, moment } = peak(row.memory, b, s);
    Object.assign(found, { peak: bytes, moment, needed: bytes + row.overhead_bytes });
    if (data.device) {
      found.left = data.device.memory_bytes - found.needed;
      found.verdict = found.left < 0 ? "does not fit"
        : found.needed > data.tight_share * data.device.memory_bytes ? "tight" : "fits";
    }
  }
  if (row.speed) {
    const speed = row.speed, c = computing(data, row, b, s);
    const seconds = row.steps * c.microStep + c.update + speed.overhead;
    const ideal = exposed(row, c);
    const open = ideal + speed.contention * Math.max(0, speed.communication - ideal);
    const step = seconds + open, rate = (b * s * row.steps) / step;
    const hours = 1e9 / (rate * size) / 3600;
    Object.assign(found, {
      computing: seconds, communication: speed.communication, exposed: open, step, tokens: rate, hours,
      utilization: speed.peak_flops
        ? (rate * (speed.flops_per_token[0] + speed.flops_per_token[1] * s)) / speed.peak_flops : null,
      energy: data.device.watts ? (hours * size * data.device.watts) / 1000 : null,
    });
  }
  return found;
}

if (typeof module !== "undefined") module.exports = { evaluate };
