//! JSON-RPC 2.0, the protocol of the control socket: one line per call, one line per response.
//!
//! The method is the name of a [`Request`], and `params` are its members. The content of its [`Reply`] is the `result`;
//! a refusal is an error.

use serde::de::{DeserializeOwned, Error as _, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::message::{Reply, Request, VERSION};
use crate::events::Event;
use crate::text::printable_text;

/// Available methods.
pub(crate) const METHODS: [&str; 17] = [
    "hello",
    "status",
    "show",
    "failures",
    "capture",
    "add-device",
    "remove-device",
    "link",
    "limits",
    "share",
    "fault",
    "device-faults",
    "upgrade",
    "replace",
    "log-level",
    "events",
    "past-events",
];

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;
/// Error code of a valid call that was refused for the reason in the message.
const REFUSED: i32 = -32000;

/// A call.
#[derive(Debug)]
pub struct Call {
    /// Identifier for the response. `None`: the call is a notification, which is not answered.
    pub(crate) id: Option<Value>,
    /// The method and its parameters.
    pub(crate) method: Result<Method, CallRefused>,
}

/// A method with its parameters.
#[derive(Debug)]
pub(crate) enum Method {
    /// Asks for the server's name and capabilities.
    Hello,
    /// Any other method.
    Request(Request),
}

/// Reason why a call is refused.
#[derive(Debug)]
pub(crate) struct CallRefused {
    code: i32,
    /// Explanation for the client.
    message: String,
}

impl CallRefused {
    /// Refuses a call that is too long to be parsed.
    pub(crate) const fn too_long(message: String) -> Self {
        Self { code: INVALID_REQUEST, message }
    }
}

impl Call {
    /// Parses a line. A line that is not a call gets a refusal with the identifier null.
    pub fn parse_line(line: &[u8]) -> Self {
        let invalid = |code, message: &str| {
            let method = Err(CallRefused { code, message: printable_text(message) });
            Self { id: Some(Value::Null), method }
        };
        let mut members = match serde_json::from_slice(line) {
            Ok(Value::Object(members)) => members,
            Ok(Value::Array(_)) => return invalid(INVALID_REQUEST, "batches are not supported"),
            Ok(_) => return invalid(INVALID_REQUEST, "a call is an object"),
            Err(error) => return invalid(PARSE_ERROR, &error.to_string()),
        };
        let id = members.remove("id");
        if !matches!(id, None | Some(Value::Null | Value::String(_) | Value::Number(_))) {
            return invalid(INVALID_REQUEST, "an id is a string or a number");
        }
        let version = members.remove("jsonrpc");
        let (name, params) = (members.remove("method"), members.remove("params"));
        match (version, name) {
            _ if !members.is_empty() => invalid(INVALID_REQUEST, "a call has jsonrpc, id, method and params"),
            (Some(Value::String(version)), Some(Value::String(name))) if version == "2.0" => {
                Self { id, method: Self::method(name, params) }
            }
            _ => invalid(
                INVALID_REQUEST,
                "this is not a call of JSON-RPC 2.0, such as \
                {\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\"}",
            ),
        }
    }

    /// Returns the request of a call that asks for one.
    ///
    /// # Errors
    /// The call is refused with this message, or greets.
    pub fn request(self) -> Result<Request, String> {
        match self.method {
            Ok(Method::Request(request)) => Ok(request),
            Ok(Method::Hello) => Err("hello is answered by the control socket itself".to_owned()),
            Err(refused) => Err(refused.message),
        }
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

/// Encodes a request as a call, a line whose identifier is 1.
///
/// # Errors
/// Does not fail in practice: a request is an object.
pub fn call(request: &Request) -> serde_json::Result<Vec<u8>> {
    let Value::Object(mut params) = serde_json::to_value(request)? else {
        return Err(serde_json::Error::custom("a request is an object"));
    };
    let method = params.remove("request");
    line(&json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))
}

/// Encodes a message as a line.
///
/// # Errors
/// The message cannot be represented as JSON.
fn line(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Parses the response to a call: its result, or the reason why the call was refused.
///
/// # Errors
/// The line is not a response, or its result is of another type.
pub(crate) fn parse_response<T: DeserializeOwned>(line: &[u8]) -> serde_json::Result<Result<T, String>> {
    #[derive(Deserialize)]
    struct Refused {
        message: String,
    }
    #[derive(Deserialize)]
    struct Response<T> {
        #[serde(rename = "jsonrpc")]
        _jsonrpc: IgnoredAny,
        result: Option<T>,
        error: Option<Refused>,
    }
    match serde_json::from_slice(line)? {
        Response { result: Some(result), error: None, .. } => Ok(Ok(result)),
        Response { result: None, error: Some(refused), .. } => Ok(Err(printable_text(&refused.message))),
        Response { .. } => Err(serde_json::Error::custom("a response has a result or an error")),
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

/// Encodes a response with a result, as a line.
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
    line(&Response { jsonrpc: "2.0", id, result })
}

/// Encodes a reply as a response, a line.
///
/// # Errors
/// The reply cannot be represented as JSON.
pub(crate) fn response<S: Serialize>(id: &Value, reply: &Reply<S>) -> serde_json::Result<Vec<u8>> {
    match reply {
        Reply::Ok(status) => result(id, status),
        Reply::Objects(objects) => result(id, objects),
        Reply::Limits(limits) => result(id, limits),
        Reply::Share(words) => result(id, words),
        Reply::Upgraded(upgraded) => result(id, upgraded),
        Reply::Failures(failures) => result(id, failures),
        Reply::PastEvents(events) => result(id, events),
        Reply::Obstacles(obstacles) => result(id, obstacles),
        Reply::Given { ended } => result(id, ended),
        Reply::Capturing {} | Reply::Events {} | Reply::Done {} => result(id, &json!({})),
        Reply::Error(problem) => error(id, &CallRefused { code: REFUSED, message: problem.clone() }),
    }
}

/// Encodes an error response, as a line.
///
/// # Errors
/// Does not fail in practice: the response consists of text.
pub(crate) fn error(id: &Value, refused: &CallRefused) -> serde_json::Result<Vec<u8>> {
    let CallRefused { code, message } = refused;
    line(&json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(line: &str) -> i32 {
        Call::parse_line(line.as_bytes()).method.unwrap_err().code
    }

    #[test]
    fn calls() {
        let call = |line: &str| Call::parse_line(line.as_bytes());
        let hello = call(r#"{"jsonrpc":"2.0","id":"a","method":"hello"}"#);
        assert_eq!(hello.id, Some(json!("a")));
        assert!(matches!(hello.method, Ok(Method::Hello)));
        let link = r#"{"jsonrpc":"2.0","method":"link","params":{"device":"vm0","state":"down"}}"#;
        let link = call(link);
        assert!(link.id.is_none() && matches!(link.method, Ok(Method::Request(Request::Link { .. }))));
    }

    #[test]
    fn a_response_has_a_result_or_an_error() {
        let parse = |line: &str| parse_response::<u32>(line.as_bytes());
        assert_eq!(parse(r#"{"jsonrpc":"2.0","id":1,"result":7}"#).unwrap(), Ok(7));
        let refused = parse(r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"no\u001b"}}"#).unwrap();
        assert!(refused.is_err_and(|message| message.starts_with("no") && !message.contains('\u{1b}')));
        for wrong in [
            "SSH-2.0-OpenSSH",
            r#"{"ok":7}"#,
            r#"{"jsonrpc":"2.0","id":1}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":"seven"}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":7,"error":{"code":1,"message":""}}"#,
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn wrong_calls() {
        for (line, expected) in [
            ("nonsense", PARSE_ERROR),
            ("[]", INVALID_REQUEST),
            ("7", INVALID_REQUEST),
            ("{}", INVALID_REQUEST),
            (r#"{"request":"status"}"#, INVALID_REQUEST),
        ] {
            assert_eq!((code(line), Call::parse_line(line.as_bytes()).id), (expected, Some(Value::Null)), "{line}");
        }
        assert_eq!(code(r#"{"jsonrpc":"1.0","id":1,"method":"status"}"#), INVALID_REQUEST);
        assert_eq!(code(r#"{"jsonrpc":"2.0","id":{},"method":"status"}"#), INVALID_REQUEST);
        assert_eq!(code(r#"{"jsonrpc":"2.0","id":1,"method":"status","also":1}"#), INVALID_REQUEST);
        // Internal methods of workers.
        for name in ["serve", "start-capture", "no-such"] {
            assert_eq!(code(&json!({"jsonrpc": "2.0", "id": 1, "method": name}).to_string()), METHOD_NOT_FOUND);
        }
        for params in [json!([1]), json!({"request": "serve"}), json!({"x": 1}), json!({"device": 1})] {
            let call = json!({"jsonrpc": "2.0", "id": 1, "method": "remove-device", "params": params});
            assert_eq!(code(&call.to_string()), INVALID_PARAMS, "{call}");
        }
        let text = Call::parse_line(br#"{"jsonrpc":"2.0","id":1,"method":"\u001b[31m"}"#);
        assert!(!text.method.unwrap_err().message.contains('\u{1b}'));
    }

    /// The schema describes exactly the accepted calls: its examples are valid, and become invalid without a required
    /// parameter or with an unknown one.
    #[test]
    fn the_schema_describes_the_accepted_calls() {
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
                    Call::parse_line(call.to_string().as_bytes()).method.is_ok()
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
