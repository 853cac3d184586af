use std::io::{Read, Write};

use super::*;

/// A server of this text at a Unix socket.
fn served(source: impl Fn() -> Result<String, String> + Send + Sync + 'static) -> (MetricsServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let spec = MetricsSpec {
        address: MetricsAddress::Unix(folder.path().join("metrics")),
        access: crate::socket::SocketAccess::default(),
    };
    (MetricsServer::start(Place::open(&spec).unwrap(), Box::new(source)).unwrap(), folder)
}

fn connect(folder: &tempfile::TempDir) -> UnixStream {
    UnixStream::connect(folder.path().join("metrics")).unwrap()
}

fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

const GET: &str = "GET /metrics HTTP/1.1\r\n\r\n";

#[test]
fn metrics_are_told_and_nothing_else() {
    let (_server, folder) = served(|| Ok("# EOF\n".to_owned()));
    let told = ask(connect(&folder), GET);
    let (head, body) = told.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("openmetrics-text; version=1.0.0"), "{told}");
    assert_eq!((body, head.contains("Content-Length: 6")), ("# EOF\n", true), "{told}");
    assert!(ask(connect(&folder), "HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("Connection: close\r\n\r\n"));
    assert!(ask(connect(&folder), "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask(connect(&folder), "PUT /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    let (_server, folder) = served(|| Err("no".to_owned()));
    assert!(ask(connect(&folder), GET).starts_with("HTTP/1.1 503 "));
}

#[test]
fn a_tcp_port() {
    let spec: MetricsSpec = "127.0.0.1:0".parse().unwrap();
    let place = Place::open(&spec).unwrap();
    let Place::Tcp(listener) = &place else { panic!() };
    let address = listener.local_addr().unwrap();
    let _server = MetricsServer::start(place, Box::new(|| Ok("# EOF\n".to_owned()))).unwrap();
    assert!(ask(TcpStream::connect(address).unwrap(), GET).ends_with("\r\n\r\n# EOF\n"));
}

/// The attack: more bytes than a request has, without an end.
#[test]
fn sec_m1_a_request_without_an_end_is_refused() {
    let (_server, folder) = served(|| Ok(String::new()));
    let endless = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(MAX_HEAD));
    let mut stream = connect(&folder);
    // It may be closed before all of it is written.
    let _ = stream.write_all(endless.as_bytes());
    let mut text = [0; 12];
    stream.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"HTTP/1.1 431");
}

/// The attack: as many connections as there may be, and one more, which say nothing.
#[test]
fn sec_m2_more_connections_than_there_may_be_are_closed() {
    let (server, folder) = served(|| Ok(String::new()));
    let held: Vec<_> = (0..MAX_CONNECTIONS).map(|_| connect(&folder)).collect();
    assert_eq!(connect(&folder).read(&mut [0]).unwrap(), 0, "one too many");
    // Those that there may be end with the server, which does not wait for them.
    drop(server);
    for mut stream in held {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}

/// The attack: many ask at once, or one again and again. The networks are asked ten times a second at most.
#[test]
fn sec_m3_who_asks_while_it_is_gathered_gets_the_same() {
    let gathered = Instant::now();
    let after = |milliseconds| gathered + Duration::from_millis(milliseconds);
    // Who came first waited.
    assert!(is_fresh(gathered, gathered - Duration::from_secs(5)));
    assert_eq!([0, 99, 100, 5000].map(|late| is_fresh(gathered, after(late))), [true, true, false, false]);
}
