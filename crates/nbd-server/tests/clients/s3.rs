//! A local S3 server, and a proxy before it that counts requests, delays them, and spoils some.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};

use crate::lab::*;

/// What the environment of a trial's server has; the values are sought in all that the server says.
pub(crate) const CREDENTIALS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "AKIAhidden0000000000"),
    ("AWS_SECRET_ACCESS_KEY", "hidden/Secret+Access/Key000000000000000="),
    ("AWS_SESSION_TOKEN", "hidden+Session/Token00000000000000000000=="),
];

/// A server of a volume on an S3 server, or `offlock-nbd snapshot`, by `env`.
pub(crate) fn environment(endpoint: &str) -> Vec<String> {
    let set = |(name, value): (&str, &str)| format!("{name}={value}");
    let region = [("AWS_REGION", "us-east-1"), ("AWS_ENDPOINT", endpoint)];
    let settings = CREDENTIALS.into_iter().chain(region).map(set);
    ["env".to_owned(), "OFFLOCK_LOG=trace".to_owned()].into_iter().chain(settings).collect()
}

pub(crate) fn check_hidden(text: &str) -> Res {
    let seen = text.lines().find(|line| line.contains("hidden"));
    check!(seen.is_none(), "a credential is shown: {seen:?}");
    Ok(())
}

/// A local S3 server with the bucket `bucket`, and its address.
pub(crate) fn moto(lab: &Lab) -> Res<(Tracked, String)> {
    let log = lab.path("moto.log");
    let mut command = Command::new("moto_server");
    command.args(["-H", "127.0.0.1", "-p", "0"]).stdin(Stdio::null()).stdout(Stdio::null());
    let process = lab.spawn(command.stderr(File::create(&log)?))?;
    let address = wait_until(|| {
        let text = fs::read_to_string(&log).ok()?;
        let (_, rest) = text.split_once("Running on http://")?;
        rest.split_once('\n').map(|(address, _)| address.trim().to_owned())
    });
    let Some(address) = address else {
        fail!("moto does not run: {}", fs::read_to_string(&log)?);
    };
    let mut stream = TcpStream::connect(&address)?;
    let create = "PUT /bucket HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n";
    stream.write_all(create.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    check!(answer.contains(" 200 "), "no bucket: {answer}");
    Ok((process, format!("http://{address}")))
}

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// That of the server.
    Pass,
    /// This status; the server does not see the request.
    Status(u16),
    /// None, and the server does not see the request.
    Lost,
    /// None, after the server has carried the request out.
    Unanswered,
    /// That of the server to a second copy of the request.
    Repeated,
    /// That of the server, after this many seconds.
    Late(u64),
}

type Rule = Box<dyn FnMut(&str) -> Answer + Send>;

pub(crate) struct Proxy {
    /// `http://` and an address.
    pub(crate) endpoint: String,
    shared: Arc<Shared>,
}

struct Shared {
    server: String,
    /// Added to each request.
    delay: Duration,
    rule: Mutex<Rule>,
    /// The number of requests and the bytes of their bodies, by method.
    seen: Mutex<BTreeMap<String, (u64, u64)>>,
}

impl Proxy {
    /// Starts a proxy before an S3 server. `rule` decides by the first line of a request.
    pub(crate) fn new(
        server: &str,
        delay: Duration,
        rule: impl FnMut(&str) -> Answer + Send + 'static,
    ) -> Res<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let server = server.strip_prefix("http://").unwrap_or(server).to_owned();
        let (rule, seen): (Rule, _) = (Box::new(rule), Mutex::default());
        let shared = Arc::new(Shared { server, delay, rule: Mutex::new(rule), seen });
        let of_listener = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&of_listener);
                // A client whose request is not answered sends it again.
                thread::spawn(move || shared.answer(stream).unwrap_or_default());
            }
        });
        Ok(Self { endpoint, shared })
    }

    pub(crate) fn set_rule(&self, rule: impl FnMut(&str) -> Answer + Send + 'static) {
        *self.shared.rule.lock().expect("no panic under the lock") = Box::new(rule);
    }

    /// Returns the number of requests with a method, and the bytes of their bodies; of all methods for "".
    pub(crate) fn seen(&self, method: &str) -> (u64, u64) {
        let seen = self.shared.seen.lock().expect("no panic under the lock");
        let of = seen.iter().filter(|(name, _)| method.is_empty() || *name == method);
        of.fold((0, 0), |sum, (_, count)| (sum.0 + count.0, sum.1 + count.1))
    }
}

impl Shared {
    /// Carries out the one request of a connection.
    fn answer(&self, client: TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        let (mut head, mut len, mut client) = (String::new(), 0, client);
        let first = loop {
            let start = head.len();
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
            let line = head[start..].to_ascii_lowercase();
            if line.trim().is_empty() {
                break head.lines().next().unwrap_or_default().to_owned();
            }
            match line.split_once(':') {
                Some(("content-length", value)) => len = value.trim().parse().unwrap_or(0),
                Some(("expect", _)) => {
                    client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
                    head.truncate(start);
                }
                Some(("connection", _)) => head.truncate(start),
                _ => {}
            }
        };
        head.insert_str(first.len() + 2, "Connection: close\r\n");
        let mut body = vec![0; len];
        reader.read_exact(&mut body)?;
        let method = first.split(' ').next().unwrap_or_default().to_owned();
        let mut seen = self.seen.lock().expect("no panic under the lock");
        let count = seen.entry(method).or_default();
        *count = (count.0 + 1, count.1 + len as u64);
        drop(seen);
        let answer = (self.rule.lock().expect("no panic under the lock"))(&first);
        thread::sleep(self.delay);
        let send = || {
            let mut server = TcpStream::connect(&self.server)?;
            server.write_all(head.as_bytes())?;
            server.write_all(&body)?;
            Ok::<_, io::Error>(server)
        };
        match answer {
            Answer::Lost => return Ok(()),
            Answer::Status(status) => {
                let text = format!(
                    "HTTP/1.1 {status} Status\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
                return client.write_all(text.as_bytes());
            }
            Answer::Unanswered => return send()?.read_to_end(&mut Vec::new()).map(drop),
            Answer::Repeated => drop(send()?.read_to_end(&mut Vec::new())?),
            Answer::Late(seconds) => thread::sleep(Duration::from_secs(seconds)),
            Answer::Pass => {}
        }
        io::copy(&mut send()?, &mut client).map(drop)
    }
}
