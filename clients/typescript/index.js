// A client of Headrace's HTTP API: one method per operation, for Node.js 18, browsers, Deno and Bun.

import { operations } from "./operations.js";

/** An answer with a status from 400: application/problem+json (RFC 9457). */
export class Problem extends Error {
  constructor(response, body) {
    super(body?.detail ?? body?.title ?? `the server answered ${response.status}`);
    this.name = "Problem";
    this.status = response.status;
    this.code = body?.code ?? "";
    this.body = body;
    const after = Number(response.headers.get("retry-after") ?? NaN);
    this.retryAfterS = Number.isFinite(after) ? after : undefined;
  }
}

export class Headrace {
  #options;

  constructor(options) {
    if (!options?.baseUrl) throw new TypeError("baseUrl is required, such as http://127.0.0.1:8080");
    this.#options = { ...options, baseUrl: options.baseUrl.replace(/\/+$/, "") };
  }

  async #send([method, template, queries, mediaType], parameters, { headers = {}, signal } = {}) {
    const { baseUrl, token, fetch: send = globalThis.fetch } = this.#options;
    const used = new Set(["body", ...queries]);
    const path = template.replace(/\{(\w+)\}/g, (_, name) => {
      const value = parameters[name];
      if (value === undefined || value === null || value === "") {
        throw new TypeError(`${name} is required`);
      }
      used.add(name);
      return encodeURIComponent(value);
    });
    for (const name of Object.keys(parameters)) {
      if (!used.has(name)) throw new TypeError(`${name} is no parameter of ${method} ${template}`);
    }
    const query = new URLSearchParams();
    for (const name of queries) {
      for (const value of [parameters[name] ?? []].flat()) query.append(name, String(value));
    }
    const all = { accept: "application/json, */*;q=0.5", ...headers };
    const secret = typeof token === "function" ? await token() : token;
    if (secret) all.authorization = `Bearer ${secret}`;
    const request = { method, headers: all, signal };
    if (parameters.body !== undefined) {
      if (!Object.keys(headers).some((name) => name.toLowerCase() === "content-type")) {
        all["content-type"] = mediaType;
      }
      const isJson = mediaType === "application/json";
      request.body = isJson ? JSON.stringify(parameters.body) : parameters.body;
      if (!isJson) request.duplex = "half";
    }
    const tail = query.size ?? [...query].length;
    const response = await send(`${baseUrl}${path}${tail ? `?${query}` : ""}`, request);
    return received(response);
  }

  static {
    for (const [name, operation] of Object.entries(operations)) {
      const hasParameters = operation[2].length > 0 || operation[3] || operation[1].includes("{");
      Headrace.prototype[name] = hasParameters
        ? function (parameters, options) {
            return this.#send(operation, parameters ?? {}, options);
          }
        : function (options) {
            return this.#send(operation, {}, options);
          };
    }
  }
}

async function received(response) {
  const type = response.headers.get("content-type") ?? "";
  const isJson = /^application\/(problem\+)?json\b/.test(type);
  if (!response.ok) {
    throw new Problem(response, isJson ? await response.json() : await response.text());
  }
  if (response.status === 204 || type === "") {
    await response.body?.cancel();
    return undefined;
  }
  return isJson ? response.json() : response;
}
