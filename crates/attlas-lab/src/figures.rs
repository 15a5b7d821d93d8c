//! Pictures that several pages share: small matrices as images, figures over layers and heads, spectra. All are text
//! for a page or an SVG file; images are PNG in `data:` addresses, which need no network.

use crate::html::escape;
use attlas::diagnostics::{HeatMap, Spectra, Spectrum};
use std::fmt::Write;

/// Number of colours of an image.
const SHADES: usize = 64;
/// Decades below the largest entry at which the colour scale ends.
const DECADES: f64 = 4.0;

/// Returns the colour of `t` in 0..=1: viridis, interpolated between five of its points. Its brightness grows with `t`,
/// and it prints well in grey.
fn shade(t: f64) -> [u8; 3] {
    const POINTS: [[f64; 3]; 5] = [
        [68.0, 1.0, 84.0],
        [59.0, 82.0, 139.0],
        [33.0, 145.0, 140.0],
        [94.0, 201.0, 98.0],
        [253.0, 231.0, 37.0],
    ];
    let at = t.clamp(0.0, 1.0) * 4.0;
    let i = (at as usize).min(3);
    let w = at - i as f64;
    [0, 1, 2].map(|c| ((1.0 - w) * POINTS[i][c] + w * POINTS[i + 1][c]).round() as u8)
}

/// Returns the colour of `t` for HTML.
pub(crate) fn shade_name(t: f64) -> String {
    let [r, g, b] = shade(t);
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Encodes a matrix as a PNG in a `data:` address, on a logarithmic scale of four decades.
pub(crate) fn heat_address(map: &HeatMap) -> String {
    let largest = map.data.iter().copied().filter(|v| v.is_finite()).fold(0.0, f64::max);
    let level = |v: f64| {
        if v > 0.0 && largest > 0.0 { 1.0 + (v / largest).log10() / DECADES } else { 0.0 }
    };
    let pixels: Vec<u8> =
        map.data.iter().map(|&v| (level(v).clamp(0.0, 1.0) * (SHADES - 1) as f64).round() as u8).collect();
    format!("data:image/png;base64,{}", base64(&png(map.cols, map.rows, &pixels)))
}

/// Draws a matrix as an SVG image in the given square.
pub(crate) fn heat_image(map: &HeatMap, x: f64, y: f64, side: f64, title: &str) -> String {
    format!(
        "<image x=\"{x:.1}\" y=\"{y:.1}\" width=\"{side:.1}\" height=\"{side:.1}\" preserveAspectRatio=\"none\" \
         style=\"image-rendering:pixelated\" href=\"{}\"><title>{}</title></image>",
        heat_address(map),
        escape(title)
    )
}

/// Draws the colour bar of [`heat_image`], its upper left corner at `(x, y)`.
pub(crate) fn colour_bar(x: f64, y: f64, height: f64, meaning: &str) -> String {
    let steps = HeatMap {
        rows: SHADES,
        cols: 1,
        data: (0..SHADES).map(|i| 10f64.powf(-DECADES * i as f64 / (SHADES - 1) as f64)).collect(),
    };
    let mut bar = format!(
        "<image x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"{height:.1}\" preserveAspectRatio=\"none\" \
         style=\"image-rendering:pixelated\" href=\"{}\"/>\
         <text transform=\"translate({:.1} {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        heat_address(&steps),
        x + 58.0,
        y + height / 2.0,
        escape(meaning)
    );
    for decade in 0..=DECADES as u32 {
        let text = if decade == 0 { "1".to_string() } else { format!("1e-{decade}") };
        let _ = write!(
            bar,
            "<text x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
            x + 16.0,
            y + height * f64::from(decade) / DECADES + 4.0
        );
    }
    bar
}

/// Encodes a PNG of indexed colours. The few pixels are stored without compression.
fn png(width: usize, height: usize, pixels: &[u8]) -> Vec<u8> {
    let mut out = vec![0x89, b'P', b'N', b'G', 13, 10, 26, 10];
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        out.extend((data.len() as u32).to_be_bytes());
        let body: Vec<u8> = kind.iter().chain(data).copied().collect();
        out.extend(&body);
        out.extend(crc32(&body).to_be_bytes());
    };
    let mut header = Vec::new();
    header.extend((width as u32).to_be_bytes());
    header.extend((height as u32).to_be_bytes());
    header.extend([8, 3, 0, 0, 0]);
    chunk(b"IHDR", &header);
    let palette: Vec<u8> = (0..SHADES).flat_map(|i| shade(i as f64 / (SHADES - 1) as f64)).collect();
    chunk(b"PLTE", &palette);
    let rows: Vec<u8> =
        pixels.chunks(width.max(1)).flat_map(|row| std::iter::once(0).chain(row.iter().copied())).collect();
    let mut data = vec![0x78, 0x01];
    let blocks = rows.chunks(0xffff).count();
    for (i, block) in rows.chunks(0xffff).enumerate() {
        let len = block.len() as u16;
        data.push(u8::from(i + 1 == blocks));
        data.extend(len.to_le_bytes());
        data.extend((!len).to_le_bytes());
        data.extend(block);
    }
    data.extend(adler32(&rows).to_be_bytes());
    chunk(b"IDAT", &data);
    chunk(b"IEND", &[]);
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, b| {
        (0..8).fold(crc ^ u32::from(*b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xedb8_8320 } else { c >> 1 })
    })
}

fn adler32(bytes: &[u8]) -> u32 {
    let (a, b) = bytes.iter().fold((1u32, 0u32), |(a, b), x| {
        let a = (a + u32::from(*x)) % 65521;
        (a, (a + b) % 65521)
    });
    b << 16 | a
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let word = (0..3).fold(0u32, |w, i| w << 8 | u32::from(part.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let letter = char::from(LETTERS[(word >> (18 - 6 * i)) as usize & 63]);
            out.push(if i <= part.len() { letter } else { '=' });
        }
    }
    out
}

/// One figure of one head.
pub(crate) struct Cell {
    /// Row of the map.
    pub(crate) layer: usize,
    /// Column of the map.
    pub(crate) head: usize,
    /// The points.
    pub(crate) value: f64,
    /// Its text.
    pub(crate) label: String,
}

/// Draws a figure over layers (down) and heads (across); each cell has its value as a tooltip, in small maps also as
/// text.
pub(crate) fn layer_map(title: &str, cells: &[Cell]) -> String {
    let finite = || cells.iter().map(|c| c.value).filter(|v| v.is_finite());
    let (lo, hi) = (finite().fold(f64::INFINITY, f64::min), finite().fold(f64::NEG_INFINITY, f64::max));
    let level = |v: f64| if hi > lo { (v - lo) / (hi - lo) } else { 0.5 };
    grid(title, cells, |c| shade_name(level(c.value)), |c| if level(c.value) > 0.6 { "#000" } else { "#fff" })
}

/// Draws a table of coloured cells over layers and heads.
pub(crate) fn grid(
    title: &str,
    cells: &[Cell],
    fill: impl Fn(&Cell) -> String,
    ink: impl Fn(&Cell) -> &'static str,
) -> String {
    let mut layers: Vec<usize> = cells.iter().map(|c| c.layer).collect();
    let mut heads: Vec<usize> = cells.iter().map(|c| c.head).collect();
    for x in [&mut layers, &mut heads] {
        x.sort_unstable();
        x.dedup();
    }
    let labelled = cells.len() <= 60;
    let (width, height) = if labelled { (46.0, 24.0) } else { (20.0, 14.0) };
    let (left, top) = (34.0, 20.0);
    let (w, h) = (left + width * heads.len() as f64 + 4.0, top + height * layers.len() as f64 + 4.0);
    let mut svg = format!(
        "<svg class=\"map\" viewBox=\"0 0 {w} {h}\" style=\"max-width:{w}px\" role=\"img\" aria-label=\"{}\">",
        escape(title)
    );
    for (i, l) in layers.iter().enumerate() {
        let y = top + height * (i as f64 + 0.5) + 4.0;
        let _ = write!(svg, "<text x=\"{:.0}\" y=\"{y:.1}\" text-anchor=\"end\">{l}</text>", left - 5.0);
    }
    for (i, head) in heads.iter().enumerate() {
        let x = left + width * (i as f64 + 0.5);
        let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{head}</text>", top - 6.0);
    }
    for c in cells {
        let at = |all: &[usize], n: usize| all.iter().position(|x| *x == n).unwrap_or(0) as f64;
        let (x, y) = (left + width * at(&heads, c.head), top + height * at(&layers, c.layer));
        let _ = write!(
            svg,
            "<g tabindex=\"0\"><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>\
             <title>layer {}, head {}: {}</title>",
            width - 1.0,
            height - 1.0,
            fill(c),
            c.layer,
            c.head,
            escape(&c.label)
        );
        if labelled && c.label.chars().count() <= 7 {
            let _ = write!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" style=\"fill:{}\">{}</text>",
                x + width / 2.0,
                y + height / 2.0 + 4.0,
                ink(c),
                escape(&c.label)
            );
        }
        svg += "</g>";
    }
    svg + "</svg>"
}

/// Returns the spectra of a head in drawing order, with their names and colours.
pub(crate) fn named_spectra(s: &Spectra) -> [(&'static str, &'static str, &Spectrum); 6] {
    [
        ("Q", "#0072b2", &s.q),
        ("K", "#56b4e9", &s.k),
        ("V", "#009e73", &s.v),
        ("QKᵀ", "#e69f00", &s.qk),
        ("A", "#d55e00", &s.scores),
        ("Z⁻¹A", "#cc79a7", &s.weights),
    ]
}

/// Draws singular values, relative to the largest, against their index in a box; both axes are logarithmic.
pub(crate) fn spectra_lines(s: &Spectra, x: f64, y: f64, width: f64, height: f64) -> String {
    const LOWEST: f64 = -6.0;
    let longest = named_spectra(s).iter().map(|n| n.2.values.len()).max().unwrap_or(1).max(2) as f64;
    let at_x = |i: usize| x + width * ((i + 1) as f64).ln() / longest.ln();
    let at_y = |r: f64| y + height * (r.log10() / LOWEST).clamp(0.0, 1.0);
    let mut svg = format!(
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"none\" stroke=\"#8888\"/>"
    );
    for decade in [-2, -4] {
        let py = at_y(10f64.powi(decade));
        let _ = write!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{py:.1}\" y2=\"{py:.1}\" stroke=\"#8884\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">1e{decade}</text>",
            x + width,
            x - 3.0,
            py + 4.0
        );
    }
    for (number, (name, colour, spectrum)) in named_spectra(s).into_iter().enumerate() {
        let first = spectrum.values.first().copied().filter(|v| *v > 0.0).unwrap_or(1.0);
        let mut points = String::new();
        let mut next = 0;
        for (i, value) in spectrum.values.iter().enumerate() {
            // Steps of an eighth are finer than the line is wide.
            if i >= next && *value > 0.0 {
                let _ = write!(points, "{:.1},{:.1} ", at_x(i), at_y(value / first));
                next = i + 1 + i / 8;
            }
        }
        let _ = write!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"><title>{name}</title></polyline>\
             <text x=\"{:.1}\" y=\"{:.1}\" style=\"fill:{colour}\">{name}</text>",
            points.trim_end(),
            x + width + 4.0,
            y + 10.0 + 14.0 * number as f64
        );
    }
    svg
}

/// A line of a figure.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its label.
    pub name: String,
    /// Points, in order.
    pub points: Vec<(f64, f64)>,
    /// True for a dashed line.
    pub dashed: bool,
}

/// Draws lines as an SVG file: a linear horizontal axis, a logarithmic vertical one, and a level across.
pub fn lines(title: &str, axes: [&str; 2], level: (&str, f64), lines: &[Line]) -> String {
    const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
    let (left, top, width, height) = (64.0, 34.0, 430.0, 280.0);
    let all = || lines.iter().flat_map(|l| &l.points);
    let fold = |values: &dyn Fn() -> Vec<f64>| {
        let v = values();
        (v.iter().copied().fold(f64::INFINITY, f64::min), v.iter().copied().fold(0.0, f64::max))
    };
    let (x_lo, x_hi) = fold(&|| all().map(|p| p.0).collect());
    let (y_lo, y_hi) = fold(&|| all().map(|p| p.1).chain([level.1]).collect());
    let (y_lo, y_hi) = (y_lo * 0.93, y_hi * 1.07);
    let at_x = |x: f64| left + width * (x - x_lo) / (x_hi - x_lo).max(f64::MIN_POSITIVE);
    let at_y = |y: f64| top + height * (1.0 - (y / y_lo).ln() / (y_hi / y_lo).ln());
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 360\" font-family=\"sans-serif\" font-size=\"12\" \
         role=\"img\" aria-label=\"{0}\">\n<rect width=\"720\" height=\"360\" fill=\"#fff\"/>\n\
         <text x=\"{left}\" y=\"20\" font-size=\"14\">{0}</text>\n\
         <rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#888\"/>\n",
        escape(title)
    );
    let tick = |value: f64, end: &str, x: f64, y: f64| {
        format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{end}\" fill=\"#444\">{value}</text>\n")
    };
    let mut places: Vec<f64> = all().map(|p| p.0).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let mut last = f64::NEG_INFINITY;
    for x in places {
        // Labels that would touch are left out.
        if at_x(x) - last > 30.0 {
            svg += &tick(x, "middle", at_x(x), top + height + 16.0);
            last = at_x(x);
        }
    }
    let decade = 10f64.powf(y_lo.log10().floor());
    for y in (0..3).flat_map(|k| [1.0, 2.0, 3.0, 5.0, 7.0].map(|m| m * decade * 10f64.powi(k))) {
        if (y_lo..=y_hi).contains(&y) {
            let py = at_y(y);
            let _ = writeln!(
                svg,
                "<line x1=\"{left}\" x2=\"{:.1}\" y1=\"{py:.1}\" y2=\"{py:.1}\" stroke=\"#ddd\"/>",
                left + width
            );
            svg += &tick(y, "end", left - 6.0, py + 4.0);
        }
    }
    let py = at_y(level.1);
    let _ = write!(
        svg,
        "<line x1=\"{left}\" x2=\"{0:.1}\" y1=\"{py:.1}\" y2=\"{py:.1}\" stroke=\"#000\" stroke-dasharray=\"2 3\"/>\n\
         <text x=\"{1:.1}\" y=\"{2:.1}\">{3}</text>\n\
         <text x=\"{4:.1}\" y=\"{5:.1}\" text-anchor=\"middle\">{6}</text>\n\
         <text transform=\"translate(16 {7:.1}) rotate(-90)\" text-anchor=\"middle\">{8}</text>\n",
        left + width,
        left + width + 8.0,
        py + 4.0,
        escape(level.0),
        left + width / 2.0,
        top + height + 36.0,
        escape(axes[0]),
        top + height / 2.0,
        escape(axes[1])
    );
    for (i, line) in lines.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let dash = if line.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        let points: Vec<String> =
            line.points.iter().map(|p| format!("{:.1},{:.1}", at_x(p.0), at_y(p.1))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
            points.join(" ")
        );
        for p in &line.points {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {}, {:.2}</title></circle>",
                at_x(p.0),
                at_y(p.1),
                escape(&line.name),
                p.0,
                p.1
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{}{}</text>",
            left + width + 8.0,
            top + 12.0 + 18.0 * i as f64,
            if line.dashed { "- - " } else { "" },
            escape(&line.name)
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_and_checksums_match_published_values() {
        // RFC 4648, section 10; RFC 1950 and ISO 3309 by their usual examples.
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn an_image_holds_its_pixels_row_after_row() {
        let bytes = png(3, 2, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(&bytes[16..24], [0, 0, 0, 3, 0, 0, 0, 2]);
        let wanted = [0, 1, 2, 3, 0, 4, 5, 6];
        assert!(bytes.windows(wanted.len()).any(|w| w == wanted));
        assert!(bytes.ends_with(&[b'I', b'E', b'N', b'D', 0xae, 0x42, 0x60, 0x82]));
    }

    #[test]
    fn lines_lie_inside_their_frame_and_name_themselves() {
        let line = |name: &str, dashed| Line {
            name: name.into(),
            points: vec![(64.0, 90.0), (384.0, 30.0)],
            dashed,
        };
        let svg = lines("a < b", ["x", "y"], ("before", 27.0), &[line("one", false), line("two", true)]);
        assert!(svg.contains("a &lt; b") && svg.contains(">one<") && svg.contains("- - two"));
        // From the left edge near the top to the right edge.
        let points = svg.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let numbers: Vec<f64> = points.split([',', ' ']).map(|n| n.parse().unwrap()).collect();
        assert_eq!((numbers[0], numbers[2]), (64.0, 494.0));
        assert!(numbers[1] > 34.0 && numbers[1] < 60.0 && numbers[3] > numbers[1] && numbers[3] < 314.0);
        assert_eq!(svg.matches("<circle").count(), 4);
    }

    #[test]
    fn colours_run_from_dark_to_bright() {
        assert_eq!((shade_name(0.0), shade_name(1.0)), ("#440154".into(), "#fde725".into()));
        let light = |t: f64| shade(t).iter().map(|c| u32::from(*c)).sum::<u32>();
        assert!((0..10).all(|i| light(i as f64 / 10.0) < light((i + 1) as f64 / 10.0)));
        assert_eq!(shade(f64::NAN.max(0.0)), shade(0.0));
    }
}
