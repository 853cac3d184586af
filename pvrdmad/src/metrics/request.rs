//! HTTP requests and response heads.

/// Most bytes of the head of a request.
pub(super) const MAX_HEAD: usize = 4096;

/// Most headers of a request.
const MAX_HEADERS: usize = 32;

/// Format of the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    /// OpenMetrics.
    OpenMetrics,
    /// The older text format of Prometheus.
    Classic,
}

impl Format {
    /// Returns its media type.
    pub(super) const fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Returns the format for the value of an `Accept` header: the older one for clients that accept it and not the
    /// other. Prometheus accepts both, and prefers OpenMetrics.
    fn accepted(value: &[u8]) -> Self {
        let accepts = |kind: &[u8]| value.windows(kind.len()).any(|part| part.eq_ignore_ascii_case(kind));
        match accepts(b"text/plain") && !accepts(b"application/openmetrics-text") {
            true => Self::Classic,
            false => Self::OpenMetrics,
        }
    }
}

/// Answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// The metrics.
    Metrics {
        /// Includes the body; `false` for `HEAD`.
        body: bool,
        /// Format of the body.
        format: Format,
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
            let mut headers = request.headers.iter();
            let accept = headers.find(|header| header.name.eq_ignore_ascii_case("accept"));
            let format = accept.map_or(Format::OpenMetrics, |header| Format::accepted(header.value));
            match (request.method, path) {
                (Some("GET"), "/metrics") => Verdict::Metrics { body: true, format },
                (Some("HEAD"), "/metrics") => Verdict::Metrics { body: false, format },
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
    fn requests_are_recognized() {
        let judged = |head: &str| judge(head.as_bytes());
        let metrics = |body, format| Verdict::Metrics { body, format };
        let (new, old) = (Format::OpenMetrics, Format::Classic);
        let both = "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;q=0.8,text/plain;q=0.5\r\n\r\n";
        for (head, verdict) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: x\r\n\r\n", metrics(true, new)),
            ("GET /metrics?name=x HTTP/1.0\r\n\r\n", metrics(true, new)),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", metrics(false, new)),
            (both, metrics(true, new)),
            ("GET /metrics HTTP/1.1\r\nAccept: */*\r\n\r\n", metrics(true, new)),
            ("GET /metrics HTTP/1.1\r\nACCEPT: Text/Plain;version=0.0.4\r\n\r\n", metrics(true, old)),
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
