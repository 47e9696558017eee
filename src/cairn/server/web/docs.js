// The API's description, drawn from /openapi.json; nothing is fetched from elsewhere.

const place = document.getElementById("docs");

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function nameOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = schema.anyOf || schema.oneOf;
  if (options) return options.map(nameOf).filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") return `list of ${nameOf(schema.items) || "anything"}`;
  if (schema.type === "object" && schema.additionalProperties) return `map to ${nameOf(schema.additionalProperties) || "anything"}`;
  return schema.type || "anything";
}

function limits(schema) {
  const all = [schema, ...(schema.anyOf || [])];
  const names = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", maxLength: "length ≤", maxItems: "items ≤", pattern: "like" };
  const found = [];
  for (const each of all) for (const name in names) if (each[name] !== undefined) found.push(`${names[name]} ${each[name]}`);
  return found.join(", ");
}

function table(schema) {
  const made = element("table", "", element("tr", "", element("th", "field"), element("th", "type"), element("th", "")));
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const needed = (schema.required || []).includes(name) ? "required. " : "";
    const about = needed + [field.description, limits(field)].filter(Boolean).join(" ");
    made.append(element("tr", "", element("td", "", element("code", name)), element("td", "", element("code", nameOf(field))), element("td", about)));
  }
  return made;
}

const schema = await (await fetch("/openapi.json")).json();
place.replaceChildren(element("p", `${schema.info.title} ${schema.info.version}. ${schema.info.summary}`), element("h2", "Routes"));
for (const [path, operations] of Object.entries(schema.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const head = element("summary", "");
    const verb = element("span", method.toUpperCase());
    verb.className = "method";
    head.append(verb, element("code", path), ` ${operation.summary || ""}`);
    const body = operation.requestBody?.content["application/json"].schema;
    const answers = Object.entries(operation.responses).map(([status, answer]) => `${status} ${answer.description}`);
    const details = element("details", "", head);
    if (body) details.append(element("p", "", "Body: ", element("code", nameOf(body))), table(schema.components.schemas[nameOf(body)]));
    details.append(element("pre", answers.join("\n")));
    place.append(details);
  }
}
place.append(element("h2", "Types"));
for (const [name, type] of Object.entries(schema.components.schemas)) {
  place.append(element("details", "", element("summary", "", element("code", name)), element("p", type.description || ""), table(type)));
}
