// The `openai` package of npm. Start `quire serve MODEL --served-model-name smollm2` first.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2] ?? "http://127.0.0.1:8000/v1", apiKey: "none" });
const model = "smollm2";
const messages = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];

// A chat
const chat = await client.chat.completions.create({ model, messages, max_tokens: 32, temperature: 0 });
console.log("chat:", chat.choices[0].message.content);

// A stream
process.stdout.write("stream: ");
const chunks = await client.chat.completions.create({ model, messages, max_tokens: 32, temperature: 0, stream: true });
for await (const chunk of chunks) process.stdout.write(chunk.choices[0].delta.content ?? "");
console.log();

// Structured output
const City = z.object({ name: z.string(), country: z.string() });
const parsed = await client.responses.parse({
  model,
  input: messages,
  text: { format: zodTextFormat(City, "city") },
  max_output_tokens: 64,
  temperature: 0,
});
console.log("structured:", JSON.stringify(parsed.output_parsed));

// A tool: the model asks for a call, the client makes it, the model answers
const weather = {
  type: "function",
  name: "get_weather",
  description: "The weather in a city",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};
const input = [{ role: "user", content: "What is the weather in Paris?" }];
const asked = await client.responses.create({
  model,
  input,
  tools: [weather],
  tool_choice: "required",
  max_output_tokens: 64,
  temperature: 0,
});
const call = asked.output[0];
console.log("tool:", call.name, JSON.stringify(JSON.parse(call.arguments)));
input.push(call, { type: "function_call_output", call_id: call.call_id, output: "18 degrees, sunny" });
const answer = await client.responses.create({ model, input, max_output_tokens: 32, temperature: 0 });
console.log("answer:", answer.output_text);
