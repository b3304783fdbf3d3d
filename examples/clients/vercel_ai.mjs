// The Vercel AI SDK. Start `quire serve MODEL --served-model-name smollm2` first.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2] ?? "http://127.0.0.1:8000/v1";
const quire = createOpenAICompatible({ name: "quire", baseURL, supportsStructuredOutputs: true });
const model = quire("smollm2");
const prompt = "What is the capital of France? Answer in one sentence.";

// A chat
const chat = await generateText({ model, prompt, maxOutputTokens: 32, temperature: 0 });
console.log("chat:", chat.text);

// A stream
process.stdout.write("stream: ");
for await (const text of streamText({ model, prompt, maxOutputTokens: 32, temperature: 0 }).textStream)
  process.stdout.write(text);
console.log();

// Structured output
const City = z.object({ name: z.string(), country: z.string() });
const output = Output.object({ schema: City });
const parsed = await generateText({ model, prompt, output, maxOutputTokens: 64, temperature: 0 });
console.log("structured:", JSON.stringify(parsed.output));

// A tool: the model asks for a call, the SDK makes it, the model answers
const get_weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `18 degrees and sunny in ${city}`,
});
const withTool = {
  prompt: "What is the weather in Paris?",
  tools: { get_weather },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  stopWhen: stepCountIs(2),
  maxOutputTokens: 64,
  temperature: 0,
};
const asked = await generateText({ model, ...withTool });
console.log("tool:", asked.steps[0].toolCalls[0].toolName, JSON.stringify(asked.steps[0].toolCalls[0].input));
console.log("answer:", asked.text);

// The same over /v1/responses. Without store: false the SDK refers to earlier items, which this server does not keep.
const openai = createOpenAI({ baseURL, apiKey: "none" });
const providerOptions = { openai: { store: false } };
const again = await generateText({ model: openai("smollm2"), ...withTool, providerOptions });
console.log("responses:", again.text);
