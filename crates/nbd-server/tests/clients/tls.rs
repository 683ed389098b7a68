//! TLS: real clients, wrong certificates, and what comes in plaintext where it must not.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    let tools = &[Need::OpenSsl, Need::QemuImg, Need::NbdInfo, Need::NbdCopy];
    all([
        trial("tls/plaintext_off_this_machine", &[], insecure),
        per_backend(ALL, "tls/copies", tools, copies),
        trial("tls/foreign_certificates", tools, strangers),
        trial("tls/nothing_before", &[Need::OpenSsl], nothing_before),
        trial("tls/injected_plaintext", &[Need::OpenSsl], injected),
        trial("tls/optional", tools, optional),
        trial("tls/revoked", tools, revoked),
        trial("tls/end_behind_data", &[Need::OpenSsl], end_behind_data),
        trial("tls/broken_certificates", &[Need::OpenSsl], broken),
    ])
}

/// Makes `ca-cert.pem` and certificates of that authority in `dir`, valid for so many days.
fn certificates(lab: &Lab, dir: &Path, server_days: i32, client_days: i32) -> Res {
    fs::create_dir_all(dir)?;
    let script = format!(
        r#"set -e
cd "$1"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 10 -subj "/CN=ca of ${{PWD##*/}}" \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign -keyout ca-key.pem -out ca-cert.pem
one() {{
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=$1 -keyout $1-key.pem -out $1.csr
  printf '%s\n' basicConstraints=critical,CA:FALSE keyUsage=critical,digitalSignature extendedKeyUsage=$3 \
    subjectAltName=DNS:localhost,IP:127.0.0.1 > $1.ext
  openssl x509 -req -in $1.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days $2 -extfile $1.ext -out $1-cert.pem
}}
one server {server_days} serverAuth
one client {client_days} clientAuth
"#
    );
    lab.run_ok(Command::new("sh").args(["-c", &script, "sh"]).arg(dir))?;
    Ok(())
}

fn launch<'a>(lab: &'a Lab, backend: Backend, mode: &str, dir: &Path) -> Launch<'a> {
    let launch = Launch::new(lab, backend).image(&lab.path("a.img")).with("--tcp 127.0.0.1:0");
    launch.arg("--tls").arg(mode).arg("--tls-certificates").arg(dir)
}

fn start(lab: &Lab, backend: Backend, mode: &str, dir: &Path) -> Res<Server> {
    if !lab.path("a.img").exists() {
        image::with_parts(&lab.path("a.img"), 32 * MIB, 32, 9)?;
    }
    launch(lab, backend, mode, dir).start()
}

fn uri(server: &Server, dir: &Path) -> Res<String> {
    Ok(format!("nbds://localhost:{}/vol?tls-certificates={}", server.tcp()?.port(), dir.display()))
}

/// qemu-img's options for the export as an image.
fn qemu(server: &Server, dir: &Path) -> Res<[String; 4]> {
    let credentials = format!("tls-creds-x509,id=tls0,dir={},endpoint=client", dir.display());
    let port = server.tcp()?.port();
    let image = format!(
        "driver=nbd,host=localhost,port={port},export=vol,tls-creds=tls0,tls-hostname=localhost"
    );
    Ok(["--object".into(), credentials, "--image-opts".into(), image])
}

fn info(lab: &Lab, server: &Server, dir: &Path) -> Res<(bool, String)> {
    let uri = uri(server, dir)?;
    let mut command = Command::new("nbdinfo");
    let end = lab.run(command.args(["--json", "--no-content", &uri]))?;
    Ok((end.status.success(), end.text))
}

/// nbdinfo sees TLS; nbdcopy and qemu-img copy out and in, and compare.
fn copies(lab: &Lab, backend: Backend) -> Res {
    let dir = lab.path("pki");
    certificates(lab, &dir, 5, 5)?;
    let server = start(lab, backend, "require", &dir)?;
    let (ok, text) = info(lab, &server, &dir)?;
    check!(ok && text.contains("\"TLS\": true"), "{text}");

    let (out, uri) = (lab.path("out.img"), uri(&server, &dir)?);
    lab.run_ok(Command::new("nbdcopy").arg(&uri).arg(&out))?;
    check!(fs::read(&out)? == fs::read(lab.path("a.img"))?, "nbdcopy read something else");
    let new = lab.path("new.img");
    image::with_parts(&new, 32 * MIB, 64, 10)?;
    lab.run_ok(Command::new("nbdcopy").arg("--flush").arg(&new).arg(&uri))?;
    check!(fs::read(&new)? == fs::read(lab.path("a.img"))?, "nbdcopy wrote something else");

    let options = qemu(&server, &dir)?;
    let map = Command::new("qemu-img").arg("map").args(&options).output()?;
    check!(map.status.success(), "{}", String::from_utf8_lossy(&map.stderr));
    let back = lab.path("back.img");
    let mut convert = Command::new("qemu-img");
    convert.arg("convert").args(&options).args(["-O", "raw"]).arg(&back);
    lab.run_ok(&mut convert)?;
    check!(fs::read(&back)? == fs::read(&new)?, "qemu-img read something else");
    server.stop()
}

/// A certificate of another authority, one that has expired, and none are refused, by the server and by the client.
fn strangers(lab: &Lab) -> Res {
    let [ours, old, old_server] = ["pki", "old", "old-server"].map(|name| lab.path(name));
    // The other authority has the name of ours: GnuTLS sends no certificate of an authority with another name.
    let [others, theirs, none] = ["others/pki", "theirs", "none"].map(|name| lab.path(name));
    for (dir, server_days, client_days) in
        [(&ours, 5, 5), (&others, 5, 5), (&theirs, 5, 5), (&old, 5, -1), (&old_server, -1, 5)]
    {
        certificates(lab, dir, server_days, client_days)?;
    }
    fs::create_dir(&none)?;
    for dir in [&others, &none] {
        fs::copy(ours.join("ca-cert.pem"), dir.join("ca-cert.pem"))?; // it trusts us
    }
    for (serves, asks, wanted, reason) in [
        (&ours, &none, false, "peer sent no certificates"),
        (&ours, &others, false, "invalid peer certificate"),
        (&ours, &ours, true, ""),
        (&old, &old, false, "Expired"),
        (&theirs, &ours, false, ""), // the client refuses
        (&old_server, &old_server, false, ""),
    ] {
        let server = start(lab, Backend::Threads, "require", serves)?;
        let what = format!("{} of {}", asks.display(), serves.display());
        let (ok, text) = info(lab, &server, asks)?;
        check!(ok == wanted, "{what}: {text}");
        let options = qemu(&server, asks)?;
        let end = lab.run(Command::new("qemu-img").arg("info").args(&options))?;
        check!(end.status.success() == ok, "{what}: {}", end.text);
        server.logged(reason)?;
        if serves == &ours {
            check!(info(lab, &server, &ours)?.0, "{what}: the server no longer serves");
        }
        server.stop()?;
    }
    Ok(())
}

/// Without TLS, where it is required, no export is told of and none is opened.
fn nothing_before(lab: &Lab) -> Res {
    let dir = lab.path("pki");
    certificates(lab, &dir, 5, 5)?;
    let server = start(lab, Backend::Threads, "require", &dir)?;
    let mut client = server.greeted()?;
    for option in [opt::LIST, opt::STRUCTURED_REPLY, opt::GO, opt::INFO, 4711] {
        let kind = client.option(option, &info_data("vol"))?;
        check!(kind == (1 << 31) + 5, "option {option}: {kind:#x}, wanted ERR_TLS_REQD");
    }
    let log = server.logged("TLS is required")?;
    let told = log.lines().filter(|line| line.contains("TLS is required") && line.contains("pid "));
    check!(told.count() == 1, "the log tells not once of a client without TLS:\n{log}");
    client.send_option(opt::EXPORT_NAME, b"vol")?;
    check!(client.closed()? == 0, "EXPORT_NAME was answered");
    let mut client = server.greeted()?;
    check!(client.option(opt::ABORT, &[])? == rep::ACK, "ABORT");

    // After STARTTLS the server speaks TLS or not at all.
    let mut client = server.greeted()?;
    check!(client.option(opt::STARTTLS, &[])? == rep::ACK, "STARTTLS");
    client.send_option(opt::GO, &info_data("vol"))?;
    let alert = client.recv_vec(1)?;
    check!(alert == [21], "an alert of TLS, not {alert:x?}");
    client.closed()?;
    server.stop()
}

/// Options behind STARTTLS, in the same segment, must not pass for what is said over TLS.
fn injected(lab: &Lab) -> Res {
    let dir = lab.path("pki");
    certificates(lab, &dir, 5, 5)?;
    for mode in ["on", "require"] {
        let server = start(lab, Backend::Threads, mode, &dir)?;
        let mut client: Client = server.connect()?;
        client.read_greeting()?;
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        for option in [opt::STARTTLS, opt::LIST] {
            bytes.extend(b"IHAVEOPT");
            bytes.extend(option.to_be_bytes());
            bytes.extend([0; 4]);
        }
        client.send(&bytes)?;
        let answered = client.closed()?;
        check!(answered == 0, "{answered} bytes were answered");
        server.logged("16 bytes in plaintext follow STARTTLS")?;
        server.stop()?;
    }
    Ok(())
}

/// With `on` a client chooses: plaintext works, TLS works; with `--tls-no-verify-peer` it needs no certificate, and the
/// server no `ca-cert.pem`.
fn optional(lab: &Lab) -> Res {
    let dir = lab.path("pki");
    certificates(lab, &dir, 5, 5)?;
    let serves = lab.path("serves");
    fs::create_dir(&serves)?;
    let asks: PathBuf = lab.path("asks");
    fs::create_dir(&asks)?;
    for name in ["server-cert.pem", "server-key.pem"] {
        fs::copy(dir.join(name), serves.join(name))?;
    }
    fs::copy(dir.join("ca-cert.pem"), asks.join("ca-cert.pem"))?;
    image::sparse(&lab.path("a.img"), MIB)?;
    let server =
        launch(lab, Backend::Threads, "on", &serves).arg("--tls-no-verify-peer").start()?;
    let mut client = server.client()?;
    client.plain(cmd::FLUSH, 0, 0, 0)?.ok("FLUSH in plaintext")?;
    let (ok, text) = info(lab, &server, &asks)?;
    check!(ok && text.contains("\"TLS\": true"), "{text}");
    server.stop()
}

/// A client's certificate that the list revokes is refused; a list without it changes nothing.
fn revoked(lab: &Lab) -> Res {
    let dir = lab.path("pki");
    certificates(lab, &dir, 5, 5)?;
    for (command, wanted) in [(":", true), ("ca -revoke client-cert.pem", false)] {
        let script = format!(
            r#"set -e
cd "$1"
printf '%s\n' '[ca]' default_ca=d '[d]' database=index.txt crlnumber=crlnumber default_md=sha256 default_crl_days=5 \
  > ca.conf
ca() {{ openssl ca -config ca.conf -keyfile ca-key.pem -cert ca-cert.pem "$@"; }}
: >> index.txt
echo 01 > crlnumber
{command}
ca -gencrl -out ca-crl.pem
"#
        );
        lab.run_ok(Command::new("sh").args(["-c", &script, "sh"]).arg(&dir))?;
        let server = start(lab, Backend::Threads, "require", &dir)?;
        let (ok, text) = info(lab, &server, &dir)?;
        check!(ok == wanted, "{command}: {text}");
        if !wanted {
            server.logged("Revoked")?;
        }
        server.stop()?;
    }
    Ok(())
}

/// A goodbye, or a broken record, in the same segment as a request: the connection ends, and before it the request is
/// answered if there was a goodbye.
fn end_behind_data(lab: &Lab) -> Res {
    use std::io::{Read, Write};
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    let dir = lab.path("pki");
    certificates(lab, &dir, 5, 5)?;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join("ca-cert.pem"))?)?;
    let chain = vec![CertificateDer::from_pem_file(dir.join("client-cert.pem"))?];
    let key = PrivateKeyDer::from_pem_file(dir.join("client-key.pem"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    let config = Arc::new(config);
    let server = start(lab, Backend::Threads, "require", &dir)?;
    for goodbye in [true, false] {
        let mut client = server.greeted()?;
        check!(client.option(opt::STARTTLS, &[])? == rep::ACK, "STARTTLS");
        let mut tls = ClientConnection::new(Arc::clone(&config), "localhost".try_into()?)?;
        while tls.is_handshaking() || tls.wants_write() {
            tls.complete_io(&mut client.stream)?;
        }
        let go = info_data("vol");
        let mut said = b"IHAVEOPT".to_vec();
        said.extend(opt::GO.to_be_bytes());
        said.extend((go.len() as u32).to_be_bytes());
        said.extend(go);
        said.extend(header(0, cmd::FLUSH, 77, 0, 0));
        tls.writer().write_all(&said)?;
        let mut segment = Vec::new();
        if goodbye {
            tls.send_close_notify();
        }
        while tls.wants_write() {
            tls.write_tls(&mut segment)?;
        }
        if !goodbye {
            segment.extend([23, 3, 3, 0, 32]);
            segment.extend([0; 32]);
        }
        client.send(&segment)?;
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let count = match client.stream.read(&mut piece) {
                Err(error) if error.kind() == ErrorKind::ConnectionReset => 0,
                read => read.map_err(|e| format!("goodbye {goodbye}, no end of it: {e}"))?,
            };
            if count == 0 {
                break;
            }
            let mut received = &piece[..count];
            while !received.is_empty() {
                tls.read_tls(&mut received)?;
                if goodbye {
                    let plain = tls.process_new_packets()?.plaintext_bytes_to_read();
                    let start = answer.len();
                    answer.resize(start + plain, 0);
                    tls.reader().read_exact(&mut answer[start..])?;
                }
            }
        }
        if goodbye {
            let Some(reply) = answer.last_chunk() else { fail!("no reply in {answer:x?}") };
            let (answer, cookie) = parse_simple(reply)?;
            answer.ok("FLUSH in front of the goodbye")?;
            check!(cookie == 77, "a reply to {cookie}");
            let tickets = tls.tls13_tickets_received();
            check!(tickets == 0, "{tickets} tickets, by which a session would resume unverified");
        }
    }
    server.stop()
}

/// A file that is missing or broken is an error that names it.
fn broken(lab: &Lab) -> Res {
    let dir = lab.path("pki");
    image::sparse(&lab.path("a.img"), MIB)?;
    let nowhere = |name: &str| {
        let _ = fs::remove_file(dir.join(name));
        std::os::unix::fs::symlink("nowhere", dir.join(name))
    };
    let missing = |name: &str| fs::remove_file(dir.join(name));
    let no_key = |name: &str| fs::write(dir.join(name), "no key");
    type Break<'a> = &'a dyn Fn(&str) -> std::io::Result<()>;
    for (name, spoil, reason) in [
        ("ca-crl.pem", &nowhere as Break<'_>, "No such file"),
        ("ca-cert.pem", &nowhere, "No such file"),
        ("ca-cert.pem", &missing, "No such file"),
        ("server-cert.pem", &missing, "No such file"),
        ("server-key.pem", &no_key, ""),
    ] {
        certificates(lab, &dir, 5, 5)?;
        spoil(name)?;
        let launch = launch(lab, Backend::Threads, "on", &dir);
        launch.refused(1, &[&format!("pki/{name}"), reason])?;
        fs::remove_dir_all(&dir)?;
    }
    Ok(())
}

/// An address that other machines reach wants TLS, or the word of the user.
fn insecure(lab: &Lab) -> Res {
    image::sparse(&lab.path("a.img"), MIB)?;
    let bare = || Launch::threads(lab).image(&lab.path("a.img"));
    let open = || bare().with("--tcp 0.0.0.0:0");
    // The same for a socket that was handed over.
    let given = || -> Res<Launch<'_>> {
        let socket = TcpListener::bind("0.0.0.0:0")?;
        Ok(bare().handed_over(vec![socket.into()], None))
    };
    for (launch, wanted) in [
        (open(), "--tls require"),
        (given()?, "--tls require"),
        (launch(lab, Backend::Threads, "off", &lab.path("pki")), "--tls-certificates needs"),
    ] {
        launch.refused(1, &[wanted])?;
    }
    given()?.arg("--insecure").start()?.stop()?;
    let server = open().arg("--insecure").start()?;
    check!(server.tcp()?.ip().is_unspecified(), "{:?}", server.listeners);
    server.stop()
}
