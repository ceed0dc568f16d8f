// A memory server written with the official TypeScript SDK, 1.x, on its low level.
//
//     node server_typescript.mjs DIRECTORY_WITH_NODE_MODULES [--sse] [--stateless]
//
// prints its URL when it accepts connections and serves until its standard input ends.

import { randomUUID } from "node:crypto";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// This file is not beside its packages, so they are looked up from the directory that has them.
const require = createRequire(pathToFileURL(`${process.argv[2]}/package.json`));
const { Server } = require("@modelcontextprotocol/sdk/server/index.js");
const { StreamableHTTPServerTransport } = require("@modelcontextprotocol/sdk/server/streamableHttp.js");
const types = require("@modelcontextprotocol/sdk/types.js");
const express = require("express");

const sse = process.argv.includes("--sse");
const stateless = process.argv.includes("--stateless");
const conversations = new Map();

const tools = {
  append_memory({ conversation_id, items }) {
    const log = conversations.get(conversation_id) ?? [];
    conversations.set(conversation_id, log);
    const first_seq = log.length;
    const recorded_at = new Date().toISOString();
    items.forEach((payload, n) => log.push({ seq: first_seq + n, recorded_at, payload }));
    return { first_seq, last_seq: log.length - 1 };
  },
  replay_memory({ conversation_id, limit, offset = 0 }) {
    return { items: (conversations.get(conversation_id) ?? []).slice(offset, offset + limit) };
  },
  text_only() {
    return { "é": [1, 2.5, null, "\u2028"] };
  },
  broken() {
    throw new Error("a bug in the tool");
  },
};

function makeServer() {
  const server = new Server({ name: "memory", version: "1.0" }, { capabilities: { tools: {} } });
  server.setRequestHandler(types.ListToolsRequestSchema, () => ({
    tools: Object.keys(tools).map((name) => ({ name, inputSchema: { type: "object" } })),
  }));
  server.setRequestHandler(types.CallToolRequestSchema, ({ params }) => {
    if (!Object.hasOwn(tools, params.name)) {
      throw new types.McpError(types.ErrorCode.InvalidParams, `Unknown tool: ${params.name}`);
    }
    const value = tools[params.name](params.arguments ?? {});
    const content = [{ type: "text", text: JSON.stringify(value, null, 2) }];
    return params.name === "text_only" ? { content } : { content, structuredContent: value };
  });
  return server;
}

async function connected(options) {
  const transport = new StreamableHTTPServerTransport({ enableJsonResponse: !sse, ...options });
  await makeServer().connect(transport);
  return transport;
}

const sessions = new Map();

async function transportFor(request) {
  if (stateless) {
    return connected({ sessionIdGenerator: undefined });
  }
  const id = request.headers["mcp-session-id"];
  if (id) {
    return sessions.get(id);
  }
  // Anything but `initialize` is refused by the transport itself.
  const transport = await connected({
    sessionIdGenerator: () => randomUUID(),
    onsessioninitialized: (created) => sessions.set(created, transport),
  });
  return transport;
}

const app = express();
app.use(express.json({ limit: "8mb" }));
app.all("/mcp", async (request, response) => {
  const transport = await transportFor(request);
  if (transport) {
    await transport.handleRequest(request, response, request.body);
  } else {
    response.status(404).json({ jsonrpc: "2.0", error: { code: -32001, message: "Session not found" }, id: null });
  }
});
const listening = app.listen(0, "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${listening.address().port}/mcp`);
});
process.stdin.on("end", () => process.exit(0)).resume();
