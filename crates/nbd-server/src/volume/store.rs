//! The object store of a volume: how its address is written, and the layer that counts its requests
//! and corrects one answer of theirs.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{BoxStream, StreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    ClientOptions, CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    RenameOptions, Result, RetryConfig,
};

use super::snapshot::snapshot_name;
use crate::image_spec::parse_size;

/// How long one request may take. A guess: 8 MiB, the largest part of an upload, by a slow line.
const REQUEST: Duration = Duration::from_secs(30);
/// How often one request is sent again by the client at once; see [`super::RETRIES`] for the rest.
const CLIENT_RETRIES: usize = 2;

/// The address of a volume: `s3://BUCKET/PATH[?size=BYTES&snapshot=NAME]`, also `gs`, `az`, `file` and
/// `memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeUrl {
    /// The address without the options, which is shown. It has no secrets: credentials come from
    /// the environment.
    pub(crate) address: String,
    scheme: Scheme,
    bucket: String,
    /// The path of the volume below the bucket, or of the folder.
    path: String,
    pub(crate) size: Option<u64>,
    pub(crate) snapshot: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    S3,
    Google,
    Azure,
    File,
    Memory,
}

impl VolumeUrl {
    /// Parses an address. Returns `None` if it is no URI, but a path.
    pub(crate) fn parse(text: &str) -> Option<std::result::Result<Self, String>> {
        let (scheme, rest) = text.split_once("://")?;
        let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        scheme.bytes().all(is_scheme).then(|| Self::of(scheme, rest))
    }

    fn of(scheme: &str, rest: &str) -> std::result::Result<Self, String> {
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if place.contains('@') {
            return Err(
                "an address of a volume has no credentials: they come from the environment \
                        (AWS_ACCESS_KEY_ID ...)"
                    .into(),
            );
        }
        let parsed = match scheme {
            "s3" => Scheme::S3,
            "gs" => Scheme::Google,
            "az" => Scheme::Azure,
            "file" => Scheme::File,
            "memory" => Scheme::Memory,
            _ => {
                return Err(format!(
                    "'{scheme}://' is a URI of no object store: s3, gs, az, file or memory"
                ));
            }
        };
        let (bucket, path) = match parsed {
            Scheme::File if place.starts_with('/') => ("", place),
            Scheme::File => return Err(format!("'file://{place}': the path must begin with '/'")),
            Scheme::Memory => ("", place.trim_matches('/')),
            _ => place.split_once('/').unwrap_or((place, "")),
        };
        let path = path.trim_end_matches('/');
        if path.is_empty() && parsed != Scheme::Memory {
            return Err(format!("'{scheme}://{place}' names no volume: {scheme}://BUCKET/VOLUME"));
        }
        if bucket.is_empty() && !matches!(parsed, Scheme::File | Scheme::Memory) {
            return Err(format!("'{scheme}://{place}' names no bucket"));
        }
        let address = format!("{scheme}://{}", place.trim_end_matches('/'));
        let (bucket, path) = (bucket.to_owned(), path.to_owned());
        let mut url = Self { address, scheme: parsed, bucket, path, size: None, snapshot: None };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("size", "0")) => return Err("a volume with size=0 has no bytes".into()),
                Some(("size", bytes)) => url.size = Some(parse_size(bytes)?),
                Some(("snapshot", name)) => url.snapshot = Some(snapshot_name(name)?),
                _ => {
                    return Err(format!(
                        "'{option}' is no option of a volume: size=BYTES or snapshot=NAME"
                    ));
                }
            }
        }
        if url.size.is_some() && url.snapshot.is_some() {
            return Err("a snapshot has the size that its volume had: size= says nothing".into());
        }
        Ok(url)
    }

    /// Returns the last part of the path, the name of the export.
    pub(crate) fn name(&self) -> &str {
        self.address.rsplit('/').next().unwrap_or_default()
    }

    /// Returns whether the store lacks overwrites under a condition.
    pub(super) fn is_local(&self) -> bool {
        self.scheme == Scheme::File
    }

    /// Opens the store. Returns the path of the volume in it.
    ///
    /// # Errors
    ///
    /// If the environment has no usable credentials, or the folder cannot be made.
    pub(super) fn open(&self) -> io::Result<(Arc<dyn ObjectStore>, Path)> {
        let client = ClientOptions::new().with_timeout(REQUEST).with_connect_timeout(REQUEST / 3);
        let retry = RetryConfig {
            max_retries: CLIENT_RETRIES,
            retry_timeout: REQUEST,
            ..RetryConfig::default()
        };
        // The cryptography of the client. A second installation, or one by `--tls`, is refused.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store: Result<Arc<dyn ObjectStore>> = match self.scheme {
            Scheme::S3 => AmazonS3Builder::from_env()
                .with_bucket_name(&self.bucket)
                .with_retry(retry)
                .with_client_options(client.with_allow_http(is_http("AWS_ENDPOINT")))
                .build()
                .map(|store| Arc::new(store) as _),
            Scheme::Google => GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(&self.bucket)
                .with_retry(retry)
                .with_client_options(client)
                .build()
                .map(|store| Arc::new(store) as _),
            Scheme::Azure => MicrosoftAzureBuilder::from_env()
                .with_container_name(&self.bucket)
                .with_retry(retry)
                .with_client_options(client)
                .build()
                .map(|store| Arc::new(store) as _),
            Scheme::File => {
                let folder = PathBuf::from(&self.path);
                std::fs::create_dir_all(&folder)?;
                // `object_store`'s own parser of addresses opens a folder without fsync, and loses
                // what a FLUSH has confirmed.
                LocalFileSystem::new_with_prefix(folder)
                    .map(|store| Arc::new(store.with_fsync(true)) as _)
            }
            Scheme::Memory => Ok(Arc::new(InMemory::new()) as _),
        };
        let path = if self.scheme == Scheme::File { "volume" } else { &self.path };
        let path = Path::parse(path).map_err(io::Error::other)?;
        Ok((store.map_err(io::Error::other)?, path))
    }
}

/// Returns whether the environment's endpoint is one without TLS. To name it is to allow it.
fn is_http(name: &str) -> bool {
    let named = [name.to_owned(), format!("{name}_URL")].into_iter();
    named.flat_map(std::env::var).any(|endpoint| endpoint.starts_with("http://"))
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
#[derive(Debug)]
pub(super) struct Checked<S> {
    store: S,
    pub(super) requests: Arc<Requests>,
}

/// How often a create is sent again whose object is not there. A guess.
const CREATES: u32 = 5;

impl<S> Checked<S> {
    pub(super) fn new(store: S) -> Self {
        Self { store, requests: Arc::default() }
    }
}

impl<S: fmt::Display> fmt::Display for Checked<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Checked<S> {
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
            self.requests.note(&result);
            let refused = matches!(result, Err(Error::AlreadyExists { .. }));
            if !refused || opts.mode != PutMode::Create {
                return result;
            }
            add(&self.requests.gets, 1);
            let head = GetOptions { head: true, ..GetOptions::default() };
            // "Already there" is returned only if it is: the database would leave the number of the object out,
            // and could not be opened again. It repeats other errors.
            match self.store.get_opts(location, head).await {
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
        let result = self.store.put_multipart_opts(location, opts).await;
        self.requests.note(&result);
        let requests = Arc::clone(&self.requests);
        result.map(|upload| Box::new(Counted { upload, requests }) as _)
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        add(&self.requests.gets, 1);
        let is_head = options.head;
        let result = self.store.get_opts(location, options).await;
        self.requests.note(&result);
        if let (Ok(got), false) = (&result, is_head) {
            add(&self.requests.bytes_got, got.range.end - got.range.start);
        }
        result
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[Range<u64>],
    ) -> Result<Vec<slatedb::bytes::Bytes>> {
        add(&self.requests.gets, 1);
        let result = self.store.get_ranges(location, ranges).await;
        self.requests.note(&result);
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        add(&self.requests.bytes_got, if result.is_ok() { bytes } else { 0 });
        result
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
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        add(&self.requests.lists, 1);
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        add(&self.requests.puts, 1);
        self.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        add(&self.requests.puts, 1);
        self.store.rename_opts(from, to, options).await
    }
}

/// An upload in parts whose requests are counted.
#[derive(Debug)]
struct Counted {
    upload: Box<dyn MultipartUpload>,
    requests: Arc<Requests>,
}

#[async_trait]
impl MultipartUpload for Counted {
    fn put_part(&mut self, data: PutPayload) -> object_store::UploadPart {
        add(&self.requests.puts, 1);
        add(&self.requests.bytes_put, data.content_length() as u64);
        self.upload.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        add(&self.requests.puts, 1);
        let result = self.upload.complete().await;
        self.requests.note(&result);
        result
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_or_say_what_is_wrong() {
        let parse = |text| VolumeUrl::parse(text).unwrap();
        let url = parse("s3://bucket/a/b?size=100G").unwrap();
        assert_eq!((&*url.bucket, &*url.path, url.size), ("bucket", "a/b", Some(100 << 30)));
        assert_eq!((url.name(), &*url.address), ("b", "s3://bucket/a/b"));
        let url = parse("file:///mnt/v/?snapshot=x").unwrap();
        assert_eq!((&*url.path, url.snapshot.as_deref()), ("/mnt/v", Some("x")));
        assert!(parse("memory:///v?size=1M").is_ok());
        assert!(VolumeUrl::parse("disk.img").is_none() && VolumeUrl::parse("a b://c").is_none());
        for (text, named) in [
            ("http://host/v", "object store"),
            ("s3://bucket", "names no volume"),
            ("s3:///v", "names no bucket"),
            ("s3://key:secret@bucket/v", "credentials"),
            ("file://v", "begin with '/'"),
            ("s3://b/v?size=0", "no bytes"),
            ("s3://b/v?size=x", "not a size"),
            ("s3://b/v?colour=red", "'colour=red'"),
            ("s3://b/v?size=1G&snapshot=x", "snapshot"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named) && !error.contains("secret"), "{text}: {error}");
        }
    }
}
