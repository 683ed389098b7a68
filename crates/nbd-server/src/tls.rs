//! TLS on a connection's non-blocking socket.
//!
//! The certificates have the names that QEMU and nbdkit use: `server-cert.pem`, `server-key.pem`,
//! and `ca-cert.pem` of the authority that signs the certificates of clients. `ca-crl.pem`, if it
//! exists, lists revoked certificates.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::path::Path;
use std::sync::Arc;

use nbd_protocol::TlsPolicy;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use socket2::Socket;
use tracing::warn;

use crate::args::Args;

/// Most bytes that TLS buffers while the socket takes none.
const HELD: usize = 64 << 10;
/// Memory of a session in addition: keys, and incomplete records.
const SESSION: usize = 64 << 10;
/// Most bytes received in one read. Records without data make no progress, so a client could
/// keep a worker busy with them. Twice as much as one read without TLS.
const BUDGET: usize = 512 << 10;

/// The TLS configuration for clients.
#[derive(Debug, Default)]
pub(crate) struct Acceptor {
    pub(crate) policy: TlsPolicy,
    config: Option<Arc<ServerConfig>>,
}

/// A connection's socket, with its TLS session if that was started.
pub(crate) struct Wire<'a> {
    pub(crate) socket: &'a Socket,
    pub(crate) tls: Option<&'a mut Tls>,
}

impl Read for Wire<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        match &mut self.tls {
            None => socket.read(buf),
            Some(tls) => tls.read(socket, buf),
        }
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut socket = self.socket;
        match (&mut self.tls, bufs) {
            (None, bufs) => socket.read_vectored(bufs),
            (Some(tls), [first, ..]) => tls.read(socket, first),
            (Some(_), []) => Ok(0),
        }
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut socket = self.socket;
        match &mut self.tls {
            None => socket.write_vectored(pieces),
            Some(tls) => tls.write(socket, pieces),
        }
    }

    /// Sends the bytes that TLS has buffered. Fails with `WouldBlock` if the socket does not take
    /// all of them.
    fn flush(&mut self) -> io::Result<()> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.flush(self.socket))
    }
}

impl Acceptor {
    /// Reads the certificates that the command line names.
    ///
    /// # Errors
    ///
    /// A message that names the missing or malformed file, or the option.
    pub(crate) fn new(args: &Args) -> Result<Self, String> {
        match (args.tls, &args.tls_certificates) {
            (TlsPolicy::Off, None) => Ok(Self::default()),
            (TlsPolicy::Off, Some(_)) => Err("--tls-certificates needs --tls on or require".into()),
            (_, None) => Err("--tls needs --tls-certificates".into()),
            (policy, Some(dir)) => {
                let config = Some(Arc::new(config(dir, !args.tls_no_verify_peer)?));
                Ok(Self { policy, config })
            }
        }
    }

    /// Returns the most memory that a session uses.
    pub(crate) fn room(&self) -> usize {
        self.config.as_ref().map_or(0, |_| HELD + SESSION)
    }

    /// Starts a TLS session. The client sends first.
    pub(crate) fn accept(&self) -> io::Result<Box<Tls>> {
        let config = self.config.clone().ok_or(ErrorKind::Unsupported)?;
        let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(HELD));
        Ok(Box::new(Tls { session, plaintext: 0, ended: None }))
    }
}

fn config(dir: &Path, verify_peer: bool) -> Result<ServerConfig, String> {
    let file = |name: &str| dir.join(name);
    let fail = |name: &str, error: &dyn fmt::Display| format!("{}: {error}", file(name).display());
    let certificates = |name: &str| {
        let all = CertificateDer::pem_file_iter(file(name)).map_err(|e| fail(name, &e))?;
        let all: Vec<_> = all.collect::<Result<_, _>>().map_err(|e| fail(name, &e))?;
        if all.is_empty() { Err(fail(name, &"it holds no certificate")) } else { Ok(all) }
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?;
    let (ca, crl, cert, key) = ("ca-cert.pem", "ca-crl.pem", "server-cert.pem", "server-key.pem");
    let builder = if verify_peer {
        let mut roots = RootCertStore::empty();
        let hint =
            |error| format!("{error} (--tls-no-verify-peer admits clients without a certificate)");
        for certificate in certificates(ca).map_err(hint)? {
            roots.add(certificate).map_err(|e| fail(ca, &e))?;
        }
        let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        // Only a missing file means that there is no list: a dangling link is an error.
        let there = file(crl).symlink_metadata();
        if there.is_ok() || there.is_err_and(|e| e.kind() != ErrorKind::NotFound) {
            let lists = CertificateRevocationListDer::pem_file_iter(file(crl))
                .and_then(|lists| lists.collect::<Result<Vec<_>, _>>())
                .map_err(|e| fail(crl, &e))?;
            if lists.is_empty() {
                return Err(fail(crl, &"it holds no revocation list"));
            }
            verifier = verifier.with_crls(lists).allow_unknown_revocation_status();
        }
        builder.with_client_cert_verifier(verifier.build().map_err(|e| fail(ca, &e))?)
    } else {
        warn!("--tls-no-verify-peer: every client that reaches the server is admitted");
        builder.with_no_client_auth()
    };
    let chain = certificates(cert)?;
    let secret = PrivateKeyDer::from_pem_file(file(key)).map_err(|e| fail(key, &e))?;
    let mut config = builder.with_single_cert(chain, secret).map_err(|e| fail(cert, &e))?;
    // A resumed session would not be verified again, and connections are long-lived.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The TLS session of a connection.
pub(crate) struct Tls {
    session: ServerConnection,
    /// Decrypted bytes that were not read yet.
    plaintext: usize,
    /// How the input ended, after the plaintext.
    ended: Option<io::Result<()>>,
}

impl Tls {
    /// Returns whether decrypted bytes, or the end of the input, wait to be read. The socket has no
    /// event for them.
    pub(crate) fn has_plaintext(&self) -> bool {
        self.plaintext > 0 || self.ended.is_some()
    }

    /// Returns whether encrypted bytes wait for the socket.
    pub(crate) fn holds_output(&self) -> bool {
        self.session.wants_write()
    }

    /// Queues the message that ends the session.
    pub(crate) fn close(&mut self) {
        self.session.send_close_notify();
    }

    /// Reads available bytes into `buf`. Returns 0 at the end of the input.
    fn read(&mut self, socket: &Socket, buf: &mut [u8]) -> io::Result<usize> {
        let (mut filled, mut budget) = (0, BUDGET);
        while filled < buf.len() {
            match self.session.reader().read(&mut buf[filled..]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.ended.is_some() {
                        break;
                    }
                    let received = match budget {
                        0 => Err(ErrorKind::WouldBlock.into()), // epoll reports the rest again
                        _ => self.receive(socket),
                    };
                    match received {
                        Err(error) if is_transient(&error) => match filled {
                            0 => return Err(error),
                            _ => break, // the next read reports it again
                        },
                        // Data that was decrypted before the error is read first.
                        Err(error) => self.ended = Some(Err(error)),
                        Ok(count) => budget = budget.saturating_sub(count),
                    }
                }
                Err(error) if error.kind() != ErrorKind::UnexpectedEof => return Err(error),
                // UnexpectedEof is an end without a close_notify. A request that it cuts off is
                // not carried out.
                Ok(0) | Err(_) => {
                    self.ended.get_or_insert(Ok(()));
                    break;
                }
                Ok(count) => {
                    filled += count;
                    self.plaintext = self.plaintext.saturating_sub(count);
                }
            }
        }
        match self.ended.take_if(|_| filled == 0) {
            Some(Err(error)) => Err(error),
            _ => Ok(filled),
        }
    }

    /// Encrypts, and sends whenever [`HELD`] bytes are encrypted, until the socket takes no more. Returns
    /// the number of bytes taken; those that were not sent leave with the next flush.
    fn write(&mut self, socket: &Socket, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        // The first `skip` bytes of the first piece of `rest` were taken already.
        let (mut taken, mut rest, mut skip) = (0, pieces, 0);
        loop {
            while rest.first().is_some_and(|first| skip >= first.len()) {
                skip -= rest[0].len();
                rest = &rest[1..];
            }
            let Some(first) = rest.first() else { return Ok(taken) };
            let count = match skip {
                0 => self.session.writer().write_vectored(rest)?,
                _ => self.session.writer().write(&first[skip..])?,
            };
            (taken, skip) = (taken + count, skip + count);
            if count > 0 {
                continue;
            }
            if !self.holds_output() {
                return Err(ErrorKind::WriteZero.into()); // the session takes no more
            }
            match self.flush(socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && taken > 0 => {
                    return Ok(taken);
                }
                flushed => flushed?,
            }
        }
    }

    /// Sends the bytes that wait for the socket. Fails with `WouldBlock` if the socket does not
    /// take all of them.
    pub(crate) fn flush(&mut self, mut socket: &Socket) -> io::Result<()> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// Receives and decrypts once. Returns the number of bytes received. Sends the answers of
    /// the handshake at once; the next flush sends the rest.
    fn receive(&mut self, mut socket: &Socket) -> io::Result<usize> {
        let count = self.session.read_tls(&mut socket)?;
        let state = self.session.process_new_packets();
        let sent = self.flush(socket); // sends an alert too, if there is one
        self.plaintext = state.map_err(io::Error::other)?.plaintext_bytes_to_read();
        match sent {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(count),
        }
    }
}
