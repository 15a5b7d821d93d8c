//! SHA-256 (FIPS 180-4), with which records identify texts and files.

/// Returns the hash of `bytes` in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    let primes = first_primes::<64>();
    let constants = primes.map(|p| fraction_bits(f64::from(p).cbrt(), p, 3));
    let mut state: [u32; 8] =
        std::array::from_fn(|i| fraction_bits(f64::from(primes[i]).sqrt(), primes[i], 2));
    let mut blocks = bytes.chunks_exact(64);
    blocks.by_ref().for_each(|block| compress(&mut state, block, &constants));
    let mut tail = blocks.remainder().to_vec();
    tail.push(0x80);
    while tail.len() % 64 != 56 {
        tail.push(0);
    }
    tail.extend((bytes.len() as u64 * 8).to_be_bytes());
    tail.chunks_exact(64).for_each(|block| compress(&mut state, block, &constants));
    state.iter().map(|word| format!("{word:08x}")).collect()
}

/// Returns the hash of a file, or of a folder's files with their names, in the order of names.
pub fn sha256_of(path: &std::path::Path) -> std::io::Result<String> {
    if !path.is_dir() {
        return Ok(sha256(&std::fs::read(path)?));
    }
    let mut files = std::fs::read_dir(path)?.map(|e| Ok(e?.path())).collect::<std::io::Result<Vec<_>>>()?;
    files.retain(|f| f.is_file());
    files.sort();
    let mut all = String::new();
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all += &format!("{name} {}\n", sha256(&std::fs::read(&file)?));
    }
    Ok(sha256(all.as_bytes()))
}

fn first_primes<const N: usize>() -> [u32; N] {
    let mut candidates = (2u32..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    std::array::from_fn(|_| candidates.next().unwrap_or(0))
}

/// Returns the first 32 bits of the fraction of the `degree`-th root of `p`, given its approximation `root`: the
/// largest $r$ with $r^{degree} \le p\,2^{32\,degree}$, modulo $2^{32}$.
fn fraction_bits(root: f64, p: u32, degree: u32) -> u32 {
    let fits = |r: u128| r.pow(degree) <= u128::from(p) << (32 * degree);
    let mut r = (root * 4_294_967_296.0) as u128;
    while !fits(r) {
        r -= 1;
    }
    while fits(r + 1) {
        r += 1;
    }
    r as u32
}

fn compress(state: &mut [u32; 8], block: &[u8], constants: &[u32; 64]) {
    let mut w = [0u32; 64];
    for (w, b) in w.iter_mut().zip(block.chunks_exact(4)) {
        *w = u32::from_be_bytes([b[0], b[1], b[2], b[3]]);
    }
    for t in 16..64 {
        let s0 = w[t - 15].rotate_right(7) ^ w[t - 15].rotate_right(18) ^ (w[t - 15] >> 3);
        let s1 = w[t - 2].rotate_right(17) ^ w[t - 2].rotate_right(19) ^ (w[t - 2] >> 10);
        w[t] = w[t - 16].wrapping_add(s0).wrapping_add(w[t - 7]).wrapping_add(s1);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for t in 0..64 {
        let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choose = (e & f) ^ (!e & g);
        let first = h.wrapping_add(s1).wrapping_add(choose).wrapping_add(constants[t]).wrapping_add(w[t]);
        let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(s0.wrapping_add(majority)));
    }
    for (state, x) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *state = state.wrapping_add(x);
    }
}

#[cfg(test)]
mod tests {
    use super::sha256;

    #[test]
    fn the_examples_of_the_standard_are_reproduced() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(sha256(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(
            sha256(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        );
        assert_eq!(
            sha256(&vec![b'a'; 1_000_000]),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
        );
    }
}
