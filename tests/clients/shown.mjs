// What the scripts beside this one share: their task comes as JSON on standard input, what they saw leaves as JSON on standard
// output.
import { text } from "node:stream/consumers";

// ethers also writes there what it cannot do.
console.log = console.error;

export const task = JSON.parse(await text(process.stdin));

// Whole numbers leave as JSON numbers of any size.
export function show(seen) {
  const marked = JSON.stringify(seen, (_, value) => (typeof value === "bigint" ? `${value}n` : value));
  process.stdout.write(marked.replace(/"(\d+)n"/g, "$1"));
}

// What an action ends in: its result, or its error as `describe` tells it.
export async function outcome(action, describe) {
  try {
    return (await action()) ?? null;
  } catch (error) {
    return describe(error);
  }
}

// One after the other, by name.
export async function outcomes(actions, describe) {
  const seen = {};
  for (const [name, action] of Object.entries(actions)) seen[name] = await outcome(action, describe);
  return seen;
}

// All at once, in their order.
export function together(count, action, describe) {
  return Promise.all(Array.from({ length: count }, (_, at) => outcome(() => action(at), describe)));
}

// The calls of a batch of this size.
export function call(at) {
  return task.calls[at % task.calls.length];
}

// Wait for something to become true.
export async function until(condition) {
  const end = Date.now() + 30_000;
  while (!(await condition())) {
    if (Date.now() > end) throw new Error(`it did not happen: ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
