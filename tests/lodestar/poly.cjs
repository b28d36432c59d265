// Node 20 has no Promise.withResolvers, which lodestar uses.
if (!Promise.withResolvers) {
  Promise.withResolvers = function () {
    let resolve, reject;
    const promise = new Promise((good, bad) => {
      resolve = good;
      reject = bad;
    });
    return { promise, resolve, reject };
  };
}
