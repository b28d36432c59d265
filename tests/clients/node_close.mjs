// A program with Node's own WebSocket: it sends calls with large replies and closes the socket when the first one is there.
import { show, task } from "./harness.mjs";

const socket = new WebSocket(task.socket_url);
const closed = new Promise((resolve) => socket.addEventListener("close", resolve));
socket.addEventListener("open", () => {
  for (let id = 1; id <= task.calls; id += 1) {
    socket.send(JSON.stringify({ jsonrpc: "2.0", id, method: "net_listening", params: [task.size] }));
  }
});
socket.addEventListener("message", () => socket.close(task.code, "done"), { once: true });
const { code, wasClean } = await closed;
show({ code, clean: wasClean, extensions: socket.extensions });
