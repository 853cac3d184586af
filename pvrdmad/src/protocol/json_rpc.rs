//! JSON-RPC 2.0 form of the control socket's requests: one line per call, one line per response.
//!
//! The method is the `request` of the plain form, and `params` are its other members. The reply of the plain form
//! becomes the `result`; a refusal becomes an error.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::message::{Reply, Request, VERSION};
use super::text::printable_text;
use crate::events::Event;

/// Available methods. `capture` is not among them, because its answer is not JSON.
pub(crate) const METHODS: [&str; 11] = [
    "hello",
    "status",
    "show",
    "add-device",
    "remove-device",
    "link",
    "limits",
    "share",
    "fault",
    "log-level",
    "events",
];

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
/// Error code of a valid call that was refused for the reason in the message.
const REFUSED: i32 = -32000;

/// A call.
#[derive(Debug)]
pub(crate) struct Call {
    /// Identifier for the response, or `None` for a notification.
    pub(crate) id: Option<Value>,
    /// The method and its parameters.
    pub(crate) method: Result<Method, CallRefused>,
}

/// A method with its parameters.
#[derive(Debug)]
pub(crate) enum Method {
    /// Asks for the server's name and capabilities.
    Hello,
    /// A request that also exists in the plain form.
    Request(Request),
}

/// Reason why a call is refused.
#[derive(Debug)]
pub(crate) struct CallRefused {
    code: i32,
    /// Explanation for the client.
    pub(crate) message: String,
}

impl CallRefused {
    /// Makes a refusal of the plain form, which has no codes.
    pub(crate) const fn plain(message: String) -> Self {
        Self { code: PARSE_ERROR, message }
    }
}

impl Call {
    /// Parses a line. Returns `None` if it is in the plain form instead of JSON-RPC.
    pub(crate) fn parse_line(line: &[u8]) -> Option<Self> {
        let refused = |code, message: &str| Err(CallRefused { code, message: printable_text(message) });
        let mut members = match serde_json::from_slice(line) {
            Ok(Value::Object(members)) if members.contains_key("jsonrpc") => members,
            Ok(Value::Array(_)) => {
                let method = refused(INVALID_REQUEST, "batches are not taken");
                return Some(Self { id: Some(Value::Null), method });
            }
            _ => return None,
        };
        let id = members.remove("id");
        let id = match id {
            None | Some(Value::Null | Value::String(_) | Value::Number(_)) => id,
            Some(_) => {
                let method = refused(INVALID_REQUEST, "an id is a string or a number");
                return Some(Self { id: Some(Value::Null), method });
            }
        };
        let version = members.remove("jsonrpc");
        let (name, params) = (members.remove("method"), members.remove("params"));
        let method = match (version, name, params) {
            _ if !members.is_empty() => refused(INVALID_REQUEST, "a call has jsonrpc, id, method and params"),
            (Some(Value::String(version)), Some(Value::String(name)), params) if version == "2.0" => {
                Self::method(name, params)
            }
            _ => refused(INVALID_REQUEST, "this is no call of JSON-RPC 2.0"),
        };
        Some(Self { id, method })
    }

    fn method(name: String, params: Option<Value>) -> Result<Method, CallRefused> {
        let refused = |code, message: String| Err(CallRefused { code, message: printable_text(&message) });
        if !METHODS.contains(&name.as_str()) {
            return refused(
                METHOD_NOT_FOUND,
                format!("there is no method '{name}' (there are {})", METHODS.join(", ")),
            );
        }
        let mut params = match params {
            None => Map::new(),
            Some(Value::Object(params)) if !params.contains_key("request") => params,
            Some(_) => return refused(INVALID_PARAMS, "params are named".to_owned()),
        };
        if name == "hello" {
            return match params.is_empty() {
                true => Ok(Method::Hello),
                false => refused(INVALID_PARAMS, "hello has no params".to_owned()),
            };
        }
        params.insert("request".to_owned(), Value::String(name));
        serde_json::from_value(Value::Object(params))
            .map(Method::Request)
            .or_else(|error| refused(INVALID_PARAMS, error.to_string()))
    }
}

/// Returns the server's name and capabilities.
pub(crate) fn greeting() -> Value {
    json!({
        "daemon": "pvrdmad",
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": VERSION,
        "methods": METHODS,
        "events": Event::NAMES,
    })
}

/// Encodes a response with a result.
///
/// # Errors
/// The result cannot be represented as JSON.
pub(crate) fn result(id: &Value, result: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Response<'a, T> {
        jsonrpc: &'static str,
        id: &'a Value,
        result: &'a T,
    }
    serde_json::to_vec(&Response { jsonrpc: "2.0", id, result })
}

/// Encodes a plain reply as a response.
///
/// # Errors
/// The reply cannot be represented as JSON.
pub(crate) fn response<S: Serialize>(id: &Value, reply: &Reply<S>) -> serde_json::Result<Vec<u8>> {
    match reply {
        Reply::Ok(status) => result(id, status),
        Reply::Objects(objects) => result(id, objects),
        Reply::Limits(limits) => result(id, limits),
        Reply::Share(words) => result(id, words),
        Reply::Capturing {} | Reply::Events {} | Reply::Done {} => result(id, &json!({})),
        Reply::Error(problem) => error(id, &CallRefused { code: REFUSED, message: problem.clone() }),
    }
}

/// Encodes an error response.
///
/// # Errors
/// Does not fail in practice: the response consists of text.
pub(crate) fn error(id: &Value, refused: &CallRefused) -> serde_json::Result<Vec<u8>> {
    let CallRefused { code, message } = refused;
    serde_json::to_vec(&json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(line: &str) -> i32 {
        Call::parse_line(line.as_bytes()).unwrap().method.unwrap_err().code
    }

    #[test]
    fn calls() {
        let call = |line: &str| Call::parse_line(line.as_bytes());
        assert!(call(r#"{"request":"status"}"#).is_none() && call("nonsense").is_none());
        let hello = call(r#"{"jsonrpc":"2.0","id":"a","method":"hello"}"#).unwrap();
        assert_eq!(hello.id, Some(json!("a")));
        assert!(matches!(hello.method, Ok(Method::Hello)));
        let link = r#"{"jsonrpc":"2.0","method":"link","params":{"device":"vm0","state":"down"}}"#;
        let link = call(link).unwrap();
        assert!(link.id.is_none() && matches!(link.method, Ok(Method::Request(Request::Link { .. }))));
    }

    #[test]
    fn wrong_calls() {
        assert_eq!(code("[]"), INVALID_REQUEST);
        assert_eq!(code(r#"{"jsonrpc":"1.0","id":1,"method":"status"}"#), INVALID_REQUEST);
        assert_eq!(code(r#"{"jsonrpc":"2.0","id":{},"method":"status"}"#), INVALID_REQUEST);
        assert_eq!(code(r#"{"jsonrpc":"2.0","id":1,"method":"status","also":1}"#), INVALID_REQUEST);
        // Internal methods of workers, and the method whose answer is not JSON.
        for name in ["serve", "capture", "no-such"] {
            assert_eq!(code(&json!({"jsonrpc": "2.0", "id": 1, "method": name}).to_string()), METHOD_NOT_FOUND);
        }
        for params in [json!([1]), json!({"request": "serve"}), json!({"x": 1}), json!({"device": 1})] {
            let call = json!({"jsonrpc": "2.0", "id": 1, "method": "remove-device", "params": params});
            assert_eq!(code(&call.to_string()), INVALID_PARAMS, "{call}");
        }
        let text = Call::parse_line(br#"{"jsonrpc":"2.0","id":1,"method":"\u001b[31m"}"#).unwrap();
        assert!(!text.method.unwrap_err().message.contains('\u{1b}'));
    }

    /// The schema describes exactly the accepted calls: its examples are valid, and become invalid without a required
    /// parameter or with an unknown one.
    #[test]
    fn the_schema_is_what_is_taken() {
        let schema: Value = serde_json::from_str(include_str!("../../packaging/control.schema.json")).unwrap();
        let mut described = Vec::new();
        for definition in schema["oneOf"].as_array().unwrap() {
            let name = definition["properties"]["method"]["const"].as_str().unwrap().to_owned();
            let params = &definition["properties"]["params"];
            assert_eq!(params["additionalProperties"], false, "{name}");
            for example in definition["examples"].as_array().unwrap() {
                let known = params["properties"].as_object().unwrap();
                let given = example["params"].as_object().cloned().unwrap_or_default();
                assert!(given.keys().all(|key| known.contains_key(key)), "{example}");
                let taken = |params: &Map<String, Value>| {
                    let call = json!({"jsonrpc": "2.0", "id": 1, "method": name, "params": params});
                    Call::parse_line(call.to_string().as_bytes()).unwrap().method.is_ok()
                };
                assert!(taken(&given), "{example}");
                for required in params["required"].as_array().into_iter().flatten() {
                    let mut less = given.clone();
                    less.remove(required.as_str().unwrap()).unwrap();
                    assert!(!taken(&less), "{name} without {required}");
                }
                let mut more = given.clone();
                more.insert("no-such".to_owned(), json!(1));
                assert!(!taken(&more), "{name}");
            }
            described.push(name);
        }
        assert_eq!(described, METHODS);
        assert_eq!(schema["$defs"]["event"]["properties"]["event"]["enum"], json!(Event::NAMES));
    }
}
