// Shared by the scripts in this directory: each reads its task as JSON from standard input and writes its results as JSON to
// standard output.
import { text } from "node:stream/consumers";

// Some libraries log to standard output: send that to standard error.
console.log = console.info = console.error;

export const task = JSON.parse(await text(process.stdin));

// Writes the results; a BigInt becomes a JSON number of any size.
export function show(seen) {
  const marked = JSON.stringify(seen, (_, value) => (typeof value === "bigint" ? `${value}n` : value));
  process.stdout.write(marked.replace(/"(\d+)n"/g, "$1"));
}

// The result of an action, or its error in the form that `describe` returns.
export async function outcome(action, describe) {
  try {
    return (await action()) ?? null;
  } catch (error) {
    return describe(error);
  }
}

// Runs the actions one after another; returns their outcomes by name.
export async function outcomes(actions, describe) {
  const seen = {};
  for (const [name, action] of Object.entries(actions)) seen[name] = await outcome(action, describe);
  return seen;
}

// Runs `count` actions concurrently; returns their outcomes in order.
export function together(count, action, describe) {
  return Promise.all(Array.from({ length: count }, (_, at) => outcome(() => action(at), describe)));
}

// The call at this place of a batch.
export function call(at) {
  return task.calls[at % task.calls.length];
}

// Waits until the condition holds.
export async function until(condition) {
  const end = Date.now() + 30_000;
  while (!(await condition())) {
    if (Date.now() > end) throw new Error(`timed out waiting for: ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
