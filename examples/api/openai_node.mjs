// OpenAI's client for Node at a swarm: `npm install openai`, then `node examples/api/openai_node.mjs`.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.CANOPY_API ?? "http://127.0.0.1:8000"}/v1`, apiKey: "none" });
const stream = await client.chat.completions.create({
  model: "demo-target",
  messages: [{ role: "user", content: "Where is the captain?" }],
  max_completion_tokens: 48,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0].delta.content ?? "");
console.log();
