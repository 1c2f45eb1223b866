// The official Node client against a server of ours: runs the cases that it is asked for and prints what each saw.
// Usage: node openai.mjs BASE_URL CASE…; one JSON object, from case to result.
import OpenAI from "openai";

const [baseURL, ...names] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "sk-test", maxRetries: 0 });
const model = "demo-model";
const messages = [{ role: "user", content: "Hi" }];
const parameters = { type: "object", properties: { town: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

async function collect(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    const { status, code, param, type } = error;
    return { kind: error.constructor.name, status, code, param, type };
  }
  return null;
}

const cases = {
  async chat() {
    const { data, request_id } = await client.chat.completions.create({ model, messages }).withResponse();
    return { text: data.choices[0].message.content, reason: data.choices[0].finish_reason, usage: data.usage, request_id };
  },
  async chat_stream() {
    const options = { model, messages, stream: true, stream_options: { include_usage: true } };
    const chunks = await collect(await client.chat.completions.create(options));
    const deltas = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta.content ?? ""));
    return { text: deltas.join(""), usage: chunks.at(-1).usage };
  },
  async chat_runner() {
    const runner = client.chat.completions.stream({ model, messages, tools });
    const { tool_calls } = await runner.finalMessage();
    return tool_calls.map((call) => [call.id, call.function.name, JSON.parse(call.function.arguments)]);
  },
  async chat_tools() {
    const answer = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
    const [call] = answer.choices[0].message.tool_calls;
    return { call: [call.id, call.function.name, JSON.parse(call.function.arguments)], reason: answer.choices[0].finish_reason };
  },
  async chat_schema() {
    const json_schema = { name: "place", schema: parameters, strict: true };
    const response_format = { type: "json_schema", json_schema };
    const answer = await client.chat.completions.parse({ model, messages, response_format });
    return JSON.parse(answer.choices[0].message.content);
  },
  async chat_log_probs() {
    const answer = await client.chat.completions.create({ model, messages, logprobs: true, top_logprobs: 1 });
    return answer.choices[0].logprobs.content.map((entry) => [entry.token, entry.logprob, entry.top_logprobs.length]);
  },
  async unknown_model() {
    return failure(client.chat.completions.create({ model: "other", messages }));
  },
  async bad_field() {
    return failure(client.chat.completions.create({ model, messages, temperature: 9 }));
  },
  async broken_stream() {
    return failure(client.chat.completions.create({ model, messages, stream: true }).then(collect));
  },
  async response() {
    const answer = await client.responses.create({ model, input: "Hi" });
    return { text: answer.output_text, status: answer.status, again: (await client.responses.retrieve(answer.id)).output_text };
  },
  async response_stream() {
    const stream = client.responses.stream({ model, input: "Hi" });
    const kinds = (await collect(stream)).map((event) => event.type);
    return { kinds, text: (await stream.finalResponse()).output_text };
  },
  async response_tools() {
    const answer = await client.responses.create({ model, input: "Hi", tools: [{ type: "function", name: "weather", parameters }] });
    return answer.output.map((item) => [item.type, item.call_id, item.arguments]);
  },
  async models() {
    return (await collect(await client.models.list())).map((one) => one.id);
  },
};

const results = {};
for (const name of names) results[name] = await cases[name]();
console.log(JSON.stringify(results));
