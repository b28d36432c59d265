// Loaded before the bundler, which listens on every interface and has no option for it: whatever this process opens, it opens on
// 127.0.0.1.
const net = require("node:net");

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (...words) {
  if (typeof words[0] === "object" && words[0] !== null && words[0].path === undefined) words[0].host = "127.0.0.1";
  else if (Number.isInteger(Number(words[0]))) words.splice(1, typeof words[1] === "string" ? 1 : 0, "127.0.0.1");
  return listen.apply(this, words);
};
