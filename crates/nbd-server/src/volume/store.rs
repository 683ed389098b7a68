//! The object store of a volume, and the layer that counts its requests and corrects one answer of theirs.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{BoxStream, StreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::retry::{RetryContext, RetryFailure, RetryPolicy};
use object_store::{
    Attributes, ClientOptions, CopyOptions, Error, Extensions, GetOptions, GetResult,
    GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, RetryConfig,
};

use super::url::{Scheme, VolumeUrl};

/// How often the database repeats a request that failed; the pauses between are at most 1 s. Their time is
/// above that of an operation of a volume, so that the time decides.
pub(super) const RETRIES: u32 = 240;
/// How long one request may take. 8 MiB, the largest part of an upload, by a slow line.
const REQUEST: Duration = Duration::from_secs(30);

/// Opens the store. Returns the path of the volume in it.
///
/// # Errors
///
/// If the environment has no usable credentials, or the folder cannot be made.
pub(super) fn open(url: &VolumeUrl) -> io::Result<(Arc<dyn ObjectStore>, Path)> {
    let client = ClientOptions::new().with_timeout(REQUEST).with_connect_timeout(REQUEST / 3);
    // Each failure is counted: the database repeats requests, and so do `sent` and [`Parts`].
    let retry = RetryConfig { max_retries: 0, retry_timeout: REQUEST, ..RetryConfig::default() };
    // The cryptography of the client. A second installation, or one by `--tls`, is refused.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let store: Result<Arc<dyn ObjectStore>> = match url.scheme {
        Scheme::S3 => AmazonS3Builder::from_env()
            .with_bucket_name(&url.bucket)
            .with_retry(retry)
            .with_client_options(client.with_allow_http(is_http("AWS_ENDPOINT")))
            .build()
            .map(|store| Arc::new(store) as _),
        Scheme::Google => GoogleCloudStorageBuilder::from_env()
            .with_bucket_name(&url.bucket)
            .with_retry(retry)
            .with_client_options(client)
            .build()
            .map(|store| Arc::new(store) as _),
        Scheme::Azure => MicrosoftAzureBuilder::from_env()
            .with_container_name(&url.bucket)
            .with_retry(retry)
            .with_client_options(client)
            .build()
            .map(|store| Arc::new(store) as _),
        Scheme::File => {
            let folder = PathBuf::from(&url.path);
            std::fs::create_dir_all(&folder)?;
            // `object_store`'s own parser of addresses opens a folder without fsync, and loses
            // what a FLUSH has confirmed.
            LocalFileSystem::new_with_prefix(folder)
                .map(|store| Arc::new(store.with_fsync(true)) as _)
        }
        Scheme::Memory => Ok(Arc::new(InMemory::new()) as _),
    };
    let path = if url.scheme == Scheme::File { "volume" } else { &url.path };
    let path = Path::parse(path).map_err(io::Error::other)?;
    Ok((store.map_err(io::Error::other)?, path))
}

/// Returns whether the environment's endpoint is one without TLS. To name it is to allow it.
fn is_http(name: &str) -> bool {
    let named = [name.to_owned(), format!("{name}_URL")].into_iter();
    named.flat_map(std::env::var).any(|endpoint| endpoint.starts_with("http://"))
}

/// Sends a request that the database does not repeat, again if it fails.
pub(super) async fn sent<T, F>(send: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    for _ in 0..3 {
        match send().await {
            Err(error)
                if !matches!(error, Error::AlreadyExists { .. } | Error::NotFound { .. }) => {}
            result => return result,
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    send().await
}

/// Returns the text of an error of the store, without the queries of addresses: they may be signed.
pub(super) fn shown(error: &dyn std::error::Error) -> String {
    let (text, mut shown) = (error.to_string(), String::new());
    for word in text.split_inclusive(|c: char| c.is_whitespace() || "\"')>".contains(c)) {
        match word.split_once('?').filter(|_| word.contains("://")) {
            Some((address, _)) => shown.push_str(&format!("{address}?... ")),
            None => shown.push_str(word),
        }
    }
    shown
}

/// Replaces the credentials of the environment in a line of the log: a store may answer a request that
/// it refuses with the headers of the request.
pub(crate) fn without_credentials(line: Vec<u8>) -> Vec<u8> {
    static CREDENTIALS: OnceLock<Vec<String>> = OnceLock::new();
    let credentials = CREDENTIALS.get_or_init(|| {
        let all = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        all.filter(|(name, _)| has_credential(name)).flat_map(|(_, value)| forms(value)).collect()
    });
    masked(line, credentials)
}

/// Returns whether the environment's variable of this name has a credential, and not the place of one.
fn has_credential(name: &str) -> bool {
    let of_store = ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|start| name.starts_with(start));
    let is_secret = ["KEY", "SECRET", "TOKEN", "SAS", "PASSWORD"].iter().any(|w| name.contains(w));
    let is_place =
        ["_FILE", "_PATH", "_URI", "_URL", "_ENDPOINT"].iter().any(|w| name.ends_with(w));
    of_store && is_secret && !is_place
}

/// Returns a credential and those parts of it that no encoding changes.
fn forms(value: String) -> Vec<String> {
    let parts = value.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_owned);
    let mut forms: Vec<String> = parts.filter(|part| part.len() >= 16).collect();
    forms.insert(0, value);
    forms.retain(|form| form.len() >= 8); // a shorter one is part of other words
    forms
}

fn masked(line: Vec<u8>, credentials: &[String]) -> Vec<u8> {
    let text = String::from_utf8_lossy(&line);
    let masked = credentials.iter().fold(text.to_string(), |text, c| text.replace(c, "***"));
    let masked = without_named(&masked);
    if masked == text { line } else { masked.into() }
}

/// Replaces what follows the name of a credential. One that a server of the machine's provider has issued is not
/// in the environment, and a store names it in its answer, as S3 does in `<Token-0>`.
fn without_named(text: &str) -> String {
    const NAMES: [&str; 6] =
        ["token", "bearer", "credential", "signature", "sharedkey", "accesskeyid"];
    let is_value = |c: char| c.is_ascii_alphanumeric() || "+/=_.~%:-".contains(c);
    let lower = text.to_ascii_lowercase();
    let end_of = |(at, name): (usize, &str)| at + name.len();
    let mut ends: Vec<_> =
        NAMES.iter().flat_map(|name| lower.match_indices(name).map(end_of)).collect();
    ends.sort_unstable();
    let (mut masked, mut shown) = (String::new(), 0);
    for end in ends {
        if end < shown {
            continue; // part of a value
        }
        // The value is the first long word that begins close behind the name and a separator.
        let rest = &text[end..];
        let first = rest.starts_with(['=', ':', '%']).then_some(end);
        let near = rest.char_indices().take(8).filter(|&(_, c)| !is_value(c));
        let starts = first.into_iter().chain(near.map(|(at, c)| end + at + c.len_utf8()));
        let mut words = starts.map(|start| {
            start..text[start..].find(|c| !is_value(c)).map_or(text.len(), |len| start + len)
        });
        if let Some(value) = words.find(|word| word.len() >= 16) {
            masked.push_str(&text[shown..value.start]);
            masked.push_str("***");
            shown = value.end;
        }
    }
    masked + &text[shown..]
}

/// The requests to a store since it was opened. Ordering: Relaxed, all: figures for a reader.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pub(crate) puts: AtomicU64,
    pub(crate) gets: AtomicU64,
    pub(crate) lists: AtomicU64,
    pub(crate) deletes: AtomicU64,
    /// Requests that ended with an error other than that an object is or is not there.
    pub(crate) failed: AtomicU64,
    pub(crate) bytes_put: AtomicU64,
    pub(crate) bytes_got: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Requests {
    /// The names of the figures as metrics, and what they are.
    pub(crate) const FIGURES: [(&str, &str); 7] = [
        (
            "volume_puts_total",
            "Requests to the object store that write an object or a part of one.",
        ),
        ("volume_gets_total", "Requests to the object store that read."),
        ("volume_lists_total", "Requests to the object store that list objects."),
        ("volume_deletes_total", "Objects that were deleted from the object store."),
        (
            "volume_failed_total",
            "Requests to the object store that failed, also those that were repeated.",
        ),
        ("volume_put_bytes_total", "Bytes that were sent to the object store."),
        ("volume_got_bytes_total", "Bytes that the object store has sent."),
    ];

    /// Returns the figures of [`FIGURES`](Self::FIGURES).
    pub(crate) fn figures(&self) -> [u64; 7] {
        let Self { puts, gets, lists, deletes, failed, bytes_put, bytes_got } = self;
        [puts, gets, lists, deletes, failed, bytes_put, bytes_got]
            .map(|count| count.load(Ordering::Relaxed))
    }

    /// Counts a failure.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        self.note(&result);
        result
    }

    fn note<T>(&self, result: &Result<T>) {
        use Error::{AlreadyExists, NotFound, NotModified, Precondition};
        let expected = |error: &Error| {
            matches!(
                error,
                AlreadyExists { .. } | NotFound { .. } | NotModified { .. } | Precondition { .. }
            )
        };
        if result.as_ref().is_err_and(|error| !expected(error)) {
            add(&self.failed, 1);
        }
    }
}

/// A store whose requests are counted, and in which "already there" means that.
///
/// A store may answer a create with 409 because another request for the same object runs, and the
/// client says "already there" then. The database would take that for another writer and end itself. So a
/// create that is refused asks for the object, and is sent again while there is none.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    store: Arc<dyn ObjectStore>,
    pub(super) requests: Arc<Requests>,
}

/// How often a create is sent again whose object is not there.
const CREATES: u32 = 5;

impl Checked {
    pub(super) fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, requests: Arc::default() }
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Checked {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let mut attempt = 0;
        loop {
            add(&self.requests.puts, 1);
            add(&self.requests.bytes_put, payload.content_length() as u64);
            let result = self.store.put_opts(location, payload.clone(), opts.clone()).await;
            let result = self.requests.noted(result);
            let refused = matches!(result, Err(Error::AlreadyExists { .. }));
            if !refused || opts.mode != PutMode::Create {
                return result;
            }
            // "Already there" is returned only if it is: the database would leave the number of the object out,
            // and could not be opened again. It repeats other errors.
            match self.get_opts(location, GetOptions::new().with_head(true)).await {
                Ok(_) => return result,
                Err(Error::NotFound { .. }) if attempt < CREATES => {}
                Err(Error::NotFound { .. }) => {
                    let source = "a create is refused, and there is no such object".into();
                    return Err(Error::Generic { store: "object store", source });
                }
                Err(error) => return Err(error),
            }
            attempt += 1;
            tokio::time::sleep(Duration::from_millis(50) * attempt).await;
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        add(&self.requests.puts, 1);
        let attributes = opts.attributes.clone();
        let opts = opts.with_retry_policy(Arc::new(Parts(Arc::clone(&self.requests))));
        let result = self.requests.noted(self.store.put_multipart_opts(location, opts).await);
        let (store, location) = (self.clone(), location.clone());
        result.map(|upload| Box::new(Counted { upload, store, location, attributes }) as _)
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        add(&self.requests.gets, 1);
        let is_head = options.head;
        let mut got = self.requests.noted(self.store.get_opts(location, options).await)?;
        if !is_head {
            add(&self.requests.bytes_got, got.range.end - got.range.start);
        }
        let requests = Arc::clone(&self.requests);
        got.payload = match got.payload {
            GetResultPayload::Stream(bytes) => {
                GetResultPayload::Stream(bytes.inspect(move |part| requests.note(part)).boxed())
            }
            file => file,
        };
        Ok(got)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let requests = Arc::clone(&self.requests);
        let count = move |deleted: &Result<Path>| {
            add(&requests.deletes, 1);
            requests.note(deleted);
        };
        self.store.delete_stream(locations).inspect(count).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        add(&self.requests.lists, 1);
        let requests = Arc::clone(&self.requests);
        self.store.list(prefix).inspect(move |object| requests.note(object)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        add(&self.requests.lists, 1);
        self.requests.noted(self.store.list_with_delimiter(prefix).await)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        add(&self.requests.puts, 1);
        self.requests.noted(self.store.copy_opts(from, to, options).await)
    }
}

/// Sends a part again that failed. The database does not, and begins the whole object again.
#[derive(Debug)]
struct Parts(Arc<Requests>);

#[async_trait]
impl RetryPolicy for Parts {
    async fn retry(&self, context: RetryContext) -> bool {
        // Those for which the database sends no request again. The upload may be gone.
        let is_final = |status: u16| [304, 404, 409, 412].contains(&status);
        match context.failure {
            RetryFailure::Status(status) if is_final(status.as_u16()) => return false,
            _ if context.attempt > RETRIES as usize => return false,
            _ => {}
        }
        add(&self.0.failed, 1);
        add(&self.0.puts, 1);
        tokio::time::sleep(Duration::from_secs(1)).await;
        true
    }
}

/// An upload in parts whose requests are counted.
#[derive(Debug)]
struct Counted {
    upload: Box<dyn MultipartUpload>,
    store: Checked,
    location: Path,
    /// They have a number of the upload, unless the store keeps no attributes.
    attributes: Attributes,
}

impl Counted {
    /// Returns what the store has of the object if it is that of this upload.
    async fn found(&mut self) -> Option<PutResult> {
        let head = || self.store.get_opts(&self.location, GetOptions::new().with_head(true));
        let found = sent(head).await.ok()?;
        let has = |(name, value)| found.attributes.get(name) == Some(value);
        let is_ours = !self.attributes.is_empty() && self.attributes.iter().all(has);
        let ObjectMeta { e_tag, version, .. } = found.meta;
        is_ours.then(|| PutResult { e_tag, version, extensions: Extensions::default() })
    }
}

#[async_trait]
impl MultipartUpload for Counted {
    fn put_part(&mut self, data: PutPayload) -> object_store::UploadPart {
        add(&self.store.requests.puts, 1);
        add(&self.store.requests.bytes_put, data.content_length() as u64);
        let (part, requests) = (self.upload.put_part(data), Arc::clone(&self.store.requests));
        Box::pin(async move { requests.noted(part.await) })
    }

    /// After an error, looks whether the object is there: the answer may be lost, or that of a repeated request, which
    /// says that there is no such upload. The database would write the object again, and ends after the second.
    async fn complete(&mut self) -> Result<PutResult> {
        add(&self.store.requests.puts, 1);
        match self.store.requests.noted(self.upload.complete().await) {
            Err(error) => self.found().await.ok_or(error),
            done => done,
        }
    }

    async fn abort(&mut self) -> Result<()> {
        self.store.requests.noted(self.upload.abort().await)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use object_store::ObjectStoreExt;

    use super::*;

    /// Answers one request for each answer: a status with headers, and a body.
    fn answer(listener: &TcpListener, answers: &[(&str, &str)]) {
        for (head, body) in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = BufReader::new(stream.try_clone().unwrap());
            let (mut len, mut line) = (0, String::new());
            while request.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    len = value.trim().parse().unwrap();
                }
                line.clear();
            }
            request.read_exact(&mut vec![0; len]).unwrap();
            let len = body.len();
            let answer = format!("HTTP/1.1 {head}\r\nContent-Length: {len}\r\n");
            write!(stream, "{answer}Connection: close\r\n\r\n{body}").unwrap();
        }
    }

    #[tokio::test]
    async fn a_part_of_an_upload_that_failed_is_sent_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (begun, ended) =
            ("<Begun><UploadId>1</UploadId></Begun>", "<Ended><ETag>1</ETag></Ended>");
        let server = thread::spawn(move || {
            let part = [("503 Slow Down", ""), ("200 OK\r\nETag: 1", "")];
            answer(&listener, &[("200 OK", begun), part[0], part[1], ("200 OK", ended)]);
            answer(&listener, &[("200 OK", begun), ("404 Not Found", "")]);
        });
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(true)
            .with_bucket_name("bucket")
            .with_skip_signature(true)
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .build();
        let checked = Checked::new(Arc::new(store.unwrap()));
        let mut upload = checked.put_multipart(&Path::from("a")).await.unwrap();
        upload.put_part("a part".into()).await.unwrap();
        upload.complete().await.unwrap();
        let [puts, failed] = [&checked.requests.puts, &checked.requests.failed];
        assert_eq!(puts.load(Ordering::Relaxed), 4);
        assert_eq!(failed.load(Ordering::Relaxed), 1);
        let mut upload = checked.put_multipart(&Path::from("a")).await.unwrap();
        upload.put_part("a part".into()).await.expect_err("there is no such upload");
        server.join().unwrap();
    }

    #[test]
    fn credentials_are_masked_in_every_encoding() {
        assert!(
            has_credential("AWS_SECRET_ACCESS_KEY") && has_credential("AZURE_STORAGE_SAS_TOKEN")
        );
        assert!(!has_credential("AWS_REGION") && !has_credential("AWS_WEB_IDENTITY_TOKEN_FILE"));
        let key = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
        let masked = |text: String| masked(text.into(), &forms(key.into()));
        assert_eq!(masked(format!("<a>{key}</a>")), b"<a>***</a>");
        assert_eq!(masked("K7MDENG%2BbPxRfiCYEXAMPLEKEY".into()), b"K7MDENG%2B***");
        for text in [
            "no secret",
            "token is invalid",
            "the token äö is short",
            "signature",
            "s3://bucket/tokenizer-data-volume: none",
            "s3://bucket/token/of/the/data/volume",
        ] {
            assert_eq!(masked(text.into()), text.as_bytes());
        }
        // Those of a machine's provider, as stores name them.
        let token = "IQoJb3JpZ2luX2VjEMv//////////wEaCXVzLWVhc3QtMSJ";
        for (text, shown) in [
            ("<Token-0>@</Token-0><HostId>x</HostId>", "<Token-0>***</Token-0><HostId>x</HostId>"),
            ("X-Amz-Security-Token: @\\r\\nHost: b", "X-Amz-Security-Token: ***\\r\\nHost: b"),
            (r#"{"x-amz-security-token": ["@"]}"#, r#"{"x-amz-security-token": ["***"]}"#),
            ("authorization: Bearer @, and @", "authorization: Bearer ***, and @"),
            ("X-Amz-Security-Token=@&a", "X-Amz-Security-Token***&a"),
            ("Token%3D@ TOKEN:@", "Token*** TOKEN***"),
        ] {
            let masked = masked(text.replace('@', token));
            assert_eq!(String::from_utf8(masked).unwrap(), shown.replace('@', token));
        }
    }
}
