//! HTTP requests and response heads.

/// Most bytes of the head of a request.
pub(super) const MAX_HEAD: usize = 4096;

/// Most headers of a request.
const MAX_HEADERS: usize = 32;

/// Answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// The metrics.
    Metrics {
        /// Includes the body; `false` for `HEAD`.
        body: bool,
    },
    /// An error: a status with its phrase.
    Refused(&'static str),
}

/// Parses the head of a request. Returns `None` if it is incomplete.
pub(super) fn judge(head: &[u8]) -> Option<Verdict> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    Some(match request.parse(head) {
        Ok(httparse::Status::Partial) if head.len() >= MAX_HEAD => {
            Verdict::Refused("431 Request Header Fields Too Large")
        }
        Ok(httparse::Status::Partial) => return None,
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default().split('?').next().unwrap_or_default();
            match (request.method, path) {
                (Some("GET"), "/metrics") => Verdict::Metrics { body: true },
                (Some("HEAD"), "/metrics") => Verdict::Metrics { body: false },
                (Some("GET" | "HEAD"), _) => Verdict::Refused("404 Not Found"),
                _ => Verdict::Refused("405 Method Not Allowed"),
            }
        }
        Err(httparse::Error::TooManyHeaders) => Verdict::Refused("431 Request Header Fields Too Large"),
        Err(_) => Verdict::Refused("400 Bad Request"),
    })
}

/// Returns the head of a response with a body of `length` bytes. The connection is closed after it.
pub(super) fn response_head(status: &str, kind: &str, length: usize) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked() {
        let judged = |head: &str| judge(head.as_bytes());
        for (head, verdict) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: x\r\n\r\n", Verdict::Metrics { body: true }),
            ("GET /metrics?name=x HTTP/1.0\r\n\r\n", Verdict::Metrics { body: true }),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", Verdict::Metrics { body: false }),
            ("GET / HTTP/1.1\r\n\r\n", Verdict::Refused("404 Not Found")),
            ("POST /metrics HTTP/1.1\r\n\r\n", Verdict::Refused("405 Method Not Allowed")),
            ("hello\0\r\n\r\n", Verdict::Refused("400 Bad Request")),
        ] {
            assert_eq!(judged(head), Some(verdict), "{head:?}");
        }
        assert_eq!(judged("GET /metrics HTTP/1.1\r\nHost"), None);
        let long = format!("GET /metrics HTTP/1.1\r\nHost: {}", "a".repeat(MAX_HEAD));
        assert_eq!(judged(&long), Some(Verdict::Refused("431 Request Header Fields Too Large")));
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(judged(&many), Some(Verdict::Refused("431 Request Header Fields Too Large")));
    }
}
