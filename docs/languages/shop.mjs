// A shop without the SDK, in Node.js 18 or later, without any package: half, commit, check, consume.
//
//     node shop.mjs http://127.0.0.1:7400 DIRECTORY
//
// Its database is a directory. A file is created once, and whole, or not at all: that is the local transaction. In your
// service it is a transaction of your database that inserts a row with the id of Notify's transaction beside the order.
import { link, mkdir, readFile, writeFile } from "node:fs/promises";
import { randomBytes } from "node:crypto";
import { join } from "node:path";

const [url, directory] = process.argv.slice(2);
const GROUP = "shop-node";
const TOPIC = "order.placed.node";

async function request(method, path, body) {
  const answer = await fetch(url + path, {
    method, headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

/** A UUID of version 7: milliseconds, then chance. */
function newId() {
  const bytes = Buffer.concat([Buffer.alloc(6), randomBytes(10)]);
  bytes.writeUIntBE(Date.now(), 0, 6);
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = bytes.toString("hex");
  return [[0, 8], [8, 12], [12, 16], [16, 20], [20, 32]].map(([from, to]) => hex.slice(from, to)).join("-");
}

/** The transaction: write a row once. Returns what is there: this text, or that of whoever came first. */
async function insert(table, name, text) {
  await mkdir(join(directory, table), { recursive: true });
  const path = join(directory, table, name);
  const draft = `${path}.${randomBytes(8).toString("hex")}`;
  await writeFile(draft, text, { flush: true });
  try {
    await link(draft, path);
    return text;
  } catch (error) {
    if (error.code !== "EEXIST") throw error;
    return readFile(path, "utf8");
  }
}

/** Place an order. `fails`: the process dies before its commit, or before it can tell the outcome. */
async function place(item, fails) {
  const id = newId();
  const messages = [{ topic: TOPIC, key: item, body: JSON.stringify({ item }) }];
  const stored = await request("POST", "/v1/transactions", {
    producer_group: GROUP, transactions: [{ id, messages, check_after: 0.5 }],
  });
  if (stored.items[0].status !== 201) throw new Error(JSON.stringify(stored.items[0])); // roll back, and say so
  if (fails === "before the commit") return;
  const committed = (await insert("transactions", id, "COMMIT")) === "COMMIT";
  if (!committed) throw new Error(`order ${item} was rolled back by a check: it took too long`);
  if (fails === "after the commit") return;
  await request("POST", "/v1/transactions/outcomes", {
    producer_group: GROUP, outcomes: [{ id, outcome: "COMMIT" }],
  }).catch((error) => console.error(`${error.message}: the server will ask`));
}

/** Answer checks until `isOver` says so. A row that is missing is written, so that its transaction cannot commit. */
async function answerChecks(isOver) {
  while (!isOver()) {
    const asked = await request("POST", "/v1/checks/poll", {
      producer_group: GROUP, instance: `node-${process.pid}`, wait: 1, max: 100,
    });
    const outcomes = [];
    for (const check of asked.checks) {
      outcomes.push({ id: check.id, check: check.token, outcome: await insert("transactions", check.id, "ROLLBACK") });
    }
    if (outcomes.length) await request("POST", "/v1/transactions/outcomes", { producer_group: GROUP, outcomes });
  }
}

/** Handle so many messages, each id once. */
async function consume(count) {
  const group = "points-node";
  await request("PUT", `/v1/groups/${group}/subscriptions/${TOPIC}`, { start: "earliest" });
  for (let handled = 0; handled < count;) {
    const found = await request("POST", `/v1/groups/${group}/receive`, {
      instance: `node-${process.pid}`, max: 10, wait: 5, lease: 30,
    });
    const items = [];
    for (const message of found.messages) {
      const mine = randomBytes(8).toString("hex");
      if ((await insert("points", message.id, mine)) === mine) { // else it took effect before
        console.log(`points for ${JSON.parse(message.body).item}`);
        handled += 1;
      }
      items.push({ receipt: message.receipt, action: "ack" });
    }
    if (items.length) await request("POST", `/v1/groups/${group}/settle`, { items });
  }
}

let isOver = false;
const checks = answerChecks(() => isOver);
await place("book");
await place("lamp", "after the commit");
await place("ghost", "before the commit");
await consume(2);
isOver = true;
await checks;
