// Loaded before the bundler, which listens on every interface and has no option to change that. Forces all listening sockets
// of this process to 127.0.0.1.
const net = require("node:net");

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (...args) {
  if (typeof args[0] === "object" && args[0] !== null && args[0].path === undefined) args[0].host = "127.0.0.1";
  else if (Number.isInteger(Number(args[0]))) args.splice(1, typeof args[1] === "string" ? 1 : 0, "127.0.0.1");
  return listen.apply(this, args);
};
