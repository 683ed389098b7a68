//! Extended headers, by a client made by hand: requests longer than 4 GiB, and extents of as much.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    per_backend(ALL, "extended_headers", &[Need::PunchAndZero], beyond_32_bits)
}

const EXTENDED_HEADERS: u32 = 11;
const PAYLOAD_LEN: u16 = 1 << 5;
const SIZE: u64 = 6 << 30;

/// A request of those flags and that type.
fn header((flags, kind): (u16, u16), cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut request = 0x21e4_1c71_u32.to_be_bytes().to_vec();
    request.extend(flags.to_be_bytes());
    request.extend(kind.to_be_bytes());
    request.extend([cookie, offset, len].iter().flat_map(|field| field.to_be_bytes()));
    request
}

/// The header of one chunk, and its payload: type, offset of the request, payload.
fn exchange(
    client: &mut Client,
    command: (u16, u16),
    offset: u64,
    len: u64,
    payload: &[u8],
) -> Res<(u16, Vec<u8>)> {
    let cookie = client.cookie();
    let request = header(command, cookie, offset, len);
    client.send(&[&request, payload].concat())?;
    let head: [u8; 32] = client.recv()?;
    check!(be32(&head) == 0x6e8a_278c, "reply magic {:#x}", be32(&head));
    check!(head[4..6] == [0, 1], "not the last chunk");
    check!(be64(&head[8..]) == cookie && be64(&head[16..]) == offset, "{head:x?}");
    let payload = client.recv_vec(be64(&head[24..]) as usize)?;
    Ok((u16::from_be_bytes([head[6], head[7]]), payload))
}

/// Negotiates extended headers, and nothing else so far.
fn extended(mut client: Client) -> Res<Client> {
    client.greet()?;
    check!(client.option(EXTENDED_HEADERS, &[])? == rep::ACK, "extended headers");
    Ok(client)
}

fn beyond_32_bits(lab: &Lab, backend: Backend) -> Res {
    for cache in ["0", "16M"] {
        let server = Launch::new(lab, backend).sparse(SIZE)?.arg("--cache").arg(cache).start()?;
        let mut client = extended(server.connect()?)?;
        let query = b"\0\0\0\x03vol\0\0\0\x01\0\0\0\x0fbase:allocation";
        client.send_option(opt::SET_META_CONTEXT, query)?;
        let (kind, context) = client.option_reply(opt::SET_META_CONTEXT)?;
        check!(kind == rep::META_CONTEXT, "{kind:#x}");
        check!(client.option_reply(opt::SET_META_CONTEXT)?.0 == rep::ACK, "after the context");
        client.go("vol")?;

        let mut other = extended(server.connect()?)?;
        other.go("vol")?;

        // Data at both ends of what is then zeroed, but for a part of a block at either.
        let (data, write) = (vec![0x5a; 8192], (PAYLOAD_LEN, cmd::WRITE));
        for at in [0, SIZE - 8192] {
            let (kind, _) = exchange(&mut client, write, at, 8192, &data)?;
            check!(kind == 0, "WRITE at {at}: {kind:#x}");
        }
        let (offset, len) = (512, SIZE - 1024);
        let (kind, _) = exchange(&mut client, (0, cmd::WRITE_ZEROES), offset, len, &[])?;
        check!(kind == 0, "WRITE_ZEROES of {len} bytes: {kind:#x}");
        for (at, kept) in [(0, 0..512), (SIZE - 8192, 7680..8192)] {
            let (kind, payload) = exchange(&mut client, (0, cmd::READ), at, 8192, &[])?;
            check!(kind == 1 && be64(&payload) == at, "READ at {at}: {kind:#x}");
            let wanted = |index| if kept.contains(&index) { 0x5a } else { 0 };
            let right = payload[8..].iter().enumerate().all(|(index, &byte)| byte == wanted(index));
            check!(right && payload.len() == 8 + 8192, "other bytes at {at} than were written");
        }
        let (kind, payload) = exchange(&mut client, (0, cmd::BLOCK_STATUS), 0, SIZE, &[])?;
        check!(kind == 6 && payload[..4] == context[..4], "BLOCK_STATUS: {kind:#x}");
        let extents: Vec<_> =
            payload[8..].chunks_exact(16).map(|e| (be64(e), be64(&e[8..]))).collect();
        check!(be32(&payload[4..]) as usize == extents.len(), "{payload:x?}");
        check!(extents.iter().any(|&(len, flags)| len > 5 << 30 && flags == 3), "{extents:?}");

        // Refusals are chunks, too, and a payload that nothing wants is not taken for a request.
        let (kind, _) = exchange(&mut client, (PAYLOAD_LEN, cmd::READ), 0, 4096, &[0; 4096])?;
        check!(kind == 0x8001, "READ with a payload: {kind:#x}");
        let (kind, payload) = exchange(&mut client, (0, cmd::TRIM), MIB, SIZE, &[])?;
        check!(kind == 0x8001 && be32(&payload) == 22, "TRIM past the end: {kind:#x}");
        let (kind, _) = exchange(&mut client, (0, cmd::FLUSH), 0, 0, &[])?;
        check!(kind == 0, "FLUSH: {kind:#x}");
        // Data without the flag would be taken for requests, and this long a payload never ends.
        for (mut client, (flags, len)) in
            [client, other].into_iter().zip([(0, 4096), (PAYLOAD_LEN, 1 << 40)])
        {
            client.send(&header((flags, cmd::WRITE), 9, 0, len))?;
            let answered = client.closed()?;
            check!(answered == 0, "{answered} bytes in reply to a WRITE of {len} bytes");
        }
    }
    Ok(())
}
