// Compiles src/*.sol into one JSON file per contract in ../artifacts. The output is the same on every machine, because the
// code contains neither paths nor a metadata hash.
import fs from "node:fs";
import path from "node:path";
import solc from "solc";

const HERE = import.meta.dirname;
const ARTIFACTS = path.join(HERE, "../artifacts");
const SOURCES = path.join(HERE, "src");
const MODULES = path.join(HERE, "node_modules");
const SETTINGS = {
  evmVersion: "cancun",
  optimizer: { enabled: true, runs: 200 },
  metadata: { bytecodeHash: "none", appendCBOR: false },
  outputSelection: { "*": { "*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"] } },
};
// Contracts without a constructor that have the same address on every chain: their code is placed there directly.
const PLACED = new Set(["Multicall3", "NameRegistry"]);
function write(name, artifact) {
  fs.writeFileSync(path.join(ARTIFACTS, `${name}.json`), JSON.stringify(artifact) + "\n");
  console.log(`${name}: ${(artifact.bytecode.length - 2) / 2} bytes`);
}

function compile() {
  const names = fs.readdirSync(SOURCES).filter((name) => name.endsWith(".sol"));
  const sources = Object.fromEntries(names.map((name) => [name, { content: read(path.join(SOURCES, name)) }]));
  const input = { language: "Solidity", sources, settings: SETTINGS };
  const found = (name) => ({ contents: read(path.join(MODULES, name)) });
  const output = JSON.parse(solc.compile(JSON.stringify(input), { import: found }));
  for (const error of output.errors ?? []) console.error(error.formattedMessage);
  if ((output.errors ?? []).some((error) => error.severity === "error")) process.exit(1);
  for (const name of names) ours(name, output.contracts[name]);
}

function ours(file, contracts) {
  for (const [name, made] of Object.entries(contracts)) {
    const bytecode = "0x" + made.evm.bytecode.object;
    if (bytecode === "0x") continue; // abstract contract or interface
    const placed = PLACED.has(name) ? { placed: "0x" + made.evm.deployedBytecode.object } : {};
    // The packages for 0.6 and 0.7 contain a contract of the same name.
    const stored = name === "VerifyingPaymaster" ? `${name}-0.8` : name;
    write(stored, { name, source: `contracts/src/${file}`, abi: made.abi, bytecode, ...placed });
  }
}

function read(file) {
  return fs.readFileSync(file, "utf8");
}

fs.rmSync(ARTIFACTS, { recursive: true, force: true });
fs.mkdirSync(ARTIFACTS);
compile();
