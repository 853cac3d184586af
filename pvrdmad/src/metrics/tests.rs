use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Barrier;

use super::request::MAX_HEAD;
use super::table::{MAX_ASKED, MAX_READING};
use super::*;

/// Starts a server of this text at a Unix socket.
fn served(source: impl Fn() -> Result<String, String> + Send + Sync + 'static) -> (MetricsServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let spec = MetricsSpec {
        address: MetricsAddress::Unix(folder.path().join("metrics")),
        access: pvrdma_vfio_user_server::socket::SocketAccess::default(),
    };
    (MetricsServer::start(Arc::new(Place::open(&spec).unwrap()), Box::new(source)).unwrap(), folder)
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
fn only_metrics_are_served() {
    let (_server, folder) = served(|| Ok("# EOF\n".to_owned()));
    let told = ask(connect(&folder), GET);
    let (head, body) = told.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("openmetrics-text; version=1.0.0"), "{told}");
    assert_eq!((body, head.contains("Content-Length: 6")), ("# EOF\n", true), "{told}");
    let old = ask(connect(&folder), "GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n");
    assert!(
        old.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n") && old.ends_with("\r\n\r\n"),
        "{old}"
    );
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
    let _server = MetricsServer::start(Arc::new(place), Box::new(|| Ok("# EOF\n".to_owned()))).unwrap();
    assert!(ask(TcpStream::connect(address).unwrap(), GET).ends_with("\r\n\r\n# EOF\n"));
}

/// Attack: a request that is longer than permitted and never ends.
#[test]
fn a_request_without_an_end_is_refused() {
    let (_server, folder) = served(|| Ok(String::new()));
    let endless = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(MAX_HEAD));
    let mut stream = connect(&folder);
    // The server may close the connection before all of it is written.
    let _ = stream.write_all(endless.as_bytes());
    let mut text = [0; 12];
    stream.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"HTTP/1.1 431");
}

/// Attack: any number of connections that send nothing, or part of a request, also from the user of the scraper.
#[test]
fn connections_without_a_request_keep_no_scrape_out() {
    let (server, folder) = served(|| Ok("# EOF\n".to_owned()));
    let mut held = Vec::new();
    for number in 0..100 {
        let mut stream = connect(&folder);
        // The server may have closed the connection.
        let _ = stream.write_all(&GET.as_bytes()[..number % GET.len()]);
        held.push(stream);
        if number % 10 == 9 {
            assert!(ask(connect(&folder), GET).ends_with("# EOF\n"), "{number}");
        }
    }
    // The number of remaining connections is bounded: closed ones report their end, and the others end with the server.
    let mut open = 0;
    for stream in &mut held {
        stream.set_nonblocking(true).unwrap();
        open += usize::from(stream.read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
    }
    assert!((1..=MAX_READING).contains(&open), "{open}");
    drop(server);
    for stream in &mut held {
        stream.set_nonblocking(false).unwrap();
        assert!(!matches!(stream.read(&mut [0]), Ok(1..)));
    }
}

/// Attack: connections that send a request and do not read. The text is longer than the kernel's buffers.
#[test]
fn connections_that_do_not_read_keep_no_scrape_out() {
    let text = "a".repeat(4 << 20);
    let told = text.clone();
    let (_server, folder) = served(move || Ok(told.clone()));
    let mut held = Vec::new();
    for _ in 0..2 * MAX_ASKED {
        let mut stream = connect(&folder);
        stream.write_all(GET.as_bytes()).unwrap();
        // The head shows that the response is being written. The connection may have been closed before.
        let _ = stream.read_exact(&mut [0; 12]);
        held.push(stream);
    }
    // The scraper has the same user, so its connection may be closed, too, and it tries again as real ones do.
    let scraped = |_: &i32| {
        let (mut stream, mut got) = (connect(&folder), String::new());
        stream.write_all(GET.as_bytes()).is_ok() && stream.read_to_string(&mut got).is_ok() && got.ends_with(&text)
    };
    assert!((0..100).any(|attempt| scraped(&attempt)));
    // The others have been closed.
    let is_open = |stream: &&UnixStream| {
        let mut fds = [PollFd::new(*stream, PollFlags::RDHUP)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap();
        fds[0].revents().is_empty()
    };
    let open = held.iter().filter(is_open).count();
    assert!((1..=MAX_ASKED).contains(&open), "{open}");
}

/// Networks that do not answer delay only the connections that wait for the metrics.
#[test]
fn while_the_text_is_gathered_others_are_answered() {
    let barrier = Arc::new(Barrier::new(2));
    let gathers = Arc::clone(&barrier);
    let (_server, folder) = served(move || {
        gathers.wait();
        gathers.wait();
        Ok("# EOF\n".to_owned())
    });
    let mut waiting = connect(&folder);
    waiting.write_all(GET.as_bytes()).unwrap();
    barrier.wait();
    assert!(ask(connect(&folder), "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    barrier.wait();
    let mut text = String::new();
    waiting.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("# EOF\n"));
}

/// Attack: many requests at once, or repeated requests. The networks are asked at most ten times a second.
#[test]
fn repeated_requests_get_the_same_text() {
    let gathered = Instant::now();
    let after = |milliseconds| gathered + Duration::from_millis(milliseconds);
    // The request preceded the text, so it waited for it.
    assert!(is_fresh(gathered, gathered - Duration::from_secs(5)));
    assert_eq!([0, 99, 100, 5000].map(|late| is_fresh(gathered, after(late))), [true, true, false, false]);
}
