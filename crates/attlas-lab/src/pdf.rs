//! Figures as PDF, drawn from the SVG that this crate writes: rectangles, lines, polylines, circles, straight paths, text and
//! indexed images. Any other element is an error: no picture silently loses a part.
//!
//! Text is set in Helvetica, which every PDF reader has; raised characters that its encoding lacks are set smaller and
//! higher.

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Points per SVG unit; 96 units are an inch.
const UNIT: f64 = 0.75;

/// Widths of Helvetica's characters from the space to the tilde, in thousandths of its size.
const WIDTHS: [u16; 95] = [
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556,
    556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667, 611, 778, 722, 278,
    500, 667, 556, 833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469,
    556, 333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500,
    278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
];

/// Converts a picture to a PDF file of one page.
pub fn from_svg(svg: &str) -> Result<Vec<u8>> {
    let mut page = Page::default();
    let mut rest = svg;
    let mut open = None;
    while let Some(start) = rest.find('<') {
        let text = &rest[..start];
        if let Some(attributes) = &open {
            page.text(attributes, &unescape(text))?;
            open = None;
        }
        let end = rest[start..].find('>').ok_or_else(|| unknown("a tag that does not end"))? + start;
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        let name = tag.split([' ', '/', '\n']).next().unwrap_or_default();
        let attributes = attributes(tag)?;
        match name {
            "svg" => page.begin(&attributes)?,
            "style" => {
                let end = rest.find("</style>").ok_or_else(|| unknown("a style that does not end"))?;
                page.style(&rest[..end]);
                rest = &rest[end..];
            }
            "title" => {
                let end = rest.find("</title>").ok_or_else(|| unknown("a title that does not end"))?;
                rest = &rest[end..];
            }
            "text" => open = Some(attributes),
            "rect" => page.rectangle(&attributes)?,
            "line" => page.line(&attributes)?,
            "polyline" => page.polyline(&attributes)?,
            "circle" => page.circle(&attributes)?,
            "path" => page.path(&attributes)?,
            "image" => page.image(&attributes)?,
            // The end of an element, and groups, which only join parts.
            "" | "g" | "?xml" => {}
            other => return Err(unknown(other)),
        }
    }
    page.file()
}

type Attributes = BTreeMap<String, String>;

fn unknown(what: &str) -> Error {
    Error::argument(
        "a figure as PDF",
        "elements that this program draws; write .svg instead",
        format!("'{what}'"),
    )
}

fn unescape(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'");
    text.replace("&amp;", "&")
}

/// Returns the attributes of a tag, with those in `style` merged.
fn attributes(tag: &str) -> Result<Attributes> {
    let mut found = Attributes::new();
    let mut parts = tag.split('"');
    while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
        let name = name.trim().trim_end_matches('=').rsplit(char::is_whitespace).next().unwrap_or_default();
        found.insert(name.to_owned(), unescape(value));
    }
    if let Some(style) = found.remove("style") {
        let pairs = style.split(';').filter_map(|rule| rule.split_once(':'));
        found.extend(pairs.map(|(k, v)| (k.trim().to_owned(), v.trim().to_owned())));
    }
    Ok(found)
}

/// Red, green, blue and opacity.
type Colour = [f64; 4];

fn colour(text: &str) -> Result<Option<Colour>> {
    let bad = || unknown(&format!("the colour {text}"));
    if text == "none" {
        return Ok(None);
    }
    if text == "currentColor" {
        return colour("#222");
    }
    if let Some(list) = text.strip_prefix("hsl(").and_then(|t| t.strip_suffix(')')) {
        let parts: Vec<f64> =
            list.split_whitespace().filter_map(|p| p.trim_end_matches('%').parse().ok()).collect();
        let [hue, saturation, light] = parts[..] else { return Err(bad()) };
        let (s, l) = (saturation / 100.0, light / 100.0);
        let part = |n: f64| {
            let k = (n + hue / 30.0) % 12.0;
            l - s * l.min(1.0 - l) * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0)
        };
        return Ok(Some([part(0.0), part(8.0), part(4.0), 1.0]));
    }
    let digits = text.strip_prefix('#').ok_or_else(bad)?;
    let wide = if digits.len() <= 4 { 1 } else { 2 };
    let mut parts = [1.0; 4];
    if !digits.is_ascii() || !matches!(digits.len(), 3 | 4 | 6 | 8) {
        return Err(bad());
    }
    for (i, part) in parts.iter_mut().enumerate().take(digits.len() / wide) {
        let value = u8::from_str_radix(&digits[i * wide..(i + 1) * wide], 16).map_err(|_| bad())?;
        *part = f64::from(value) / if wide == 1 { 15.0 } else { 255.0 };
    }
    Ok(Some(parts))
}

/// A page while it is drawn.
#[derive(Default)]
struct Page {
    width: f64,
    height: f64,
    font_size: f64,
    ink: Option<String>,
    content: String,
    /// Opacities, in thousandths.
    opacities: Vec<u32>,
    images: Vec<Image>,
}

/// An image of indexed colours: its data are those of a PNG.
struct Image {
    width: u32,
    height: u32,
    palette: Vec<u8>,
    data: Vec<u8>,
}

impl Page {
    fn begin(&mut self, a: &Attributes) -> Result<()> {
        let sizes = a.get("viewBox").ok_or_else(|| unknown("a picture without viewBox"))?;
        let sizes: Vec<f64> = sizes.split_whitespace().filter_map(|x| x.parse().ok()).collect();
        let [_, _, width, height] = sizes[..] else { return Err(unknown("viewBox")) };
        (self.width, self.height) = (width, height);
        self.font_size = a.get("font-size").and_then(|s| s.parse().ok()).unwrap_or(16.0);
        let _ = writeln!(self.content, "{UNIT} 0 0 -{UNIT} 0 {:.2} cm", height * UNIT);
        Ok(())
    }

    /// Parses size and colour of text from `text{font:11px …;fill:#222}`.
    fn style(&mut self, css: &str) {
        let rule = css.split("text{").nth(1).and_then(|r| r.split('}').next()).unwrap_or_default();
        for part in rule.split(';') {
            match part.split_once(':') {
                Some(("font", value)) => {
                    let size = value.split("px").next().and_then(|s| s.trim().parse().ok());
                    self.font_size = size.unwrap_or(self.font_size);
                }
                Some(("fill", value)) => self.ink = Some(value.trim().to_owned()),
                _ => {}
            }
        }
    }

    /// Parses a length; percentages are shares of `whole`.
    fn length(&self, a: &Attributes, name: &str, whole: f64) -> Result<f64> {
        let Some(text) = a.get(name) else { return Ok(0.0) };
        let number = |t: &str| t.parse::<f64>().ok().filter(|x| x.is_finite());
        let found = match text.strip_suffix('%') {
            Some(share) => number(share).map(|s| s / 100.0 * whole),
            None => number(text),
        };
        found.ok_or_else(|| unknown(&format!("{name}=\"{text}\"")))
    }

    fn opacity(&mut self, value: f64) {
        let key = (value * 1000.0).round() as u32;
        let place = self.opacities.iter().position(|o| *o == key).unwrap_or_else(|| {
            self.opacities.push(key);
            self.opacities.len() - 1
        });
        let _ = writeln!(self.content, "/G{place} gs");
    }

    /// Writes a path with its fill and stroke.
    fn paint(&mut self, a: &Attributes, path: &str) -> Result<()> {
        let fill = colour(a.get("fill").map_or("#000", String::as_str))?;
        let stroke = a.get("stroke").map_or(Ok(None), |s| colour(s))?;
        for (paint, filled) in [(fill, true), (stroke, false)] {
            let Some([r, g, b, alpha]) = paint else { continue };
            let more = if filled { "fill-opacity" } else { "stroke-opacity" };
            let share = a.get(more).and_then(|o| o.parse().ok()).unwrap_or(1.0);
            self.content += "q\n";
            self.opacity(alpha * share);
            if filled {
                let _ = writeln!(self.content, "{r:.3} {g:.3} {b:.3} rg");
            } else {
                let width = a.get("stroke-width").map_or("1", String::as_str);
                let dashes = a.get("stroke-dasharray").map_or("", String::as_str);
                let _ = writeln!(self.content, "{r:.3} {g:.3} {b:.3} RG {width} w [{dashes}] 0 d");
            }
            let _ = writeln!(self.content, "{path} {}\nQ", if filled { "f" } else { "S" });
        }
        Ok(())
    }

    fn rectangle(&mut self, a: &Attributes) -> Result<()> {
        let (x, y) = (self.length(a, "x", self.width)?, self.length(a, "y", self.height)?);
        let (w, h) = (self.length(a, "width", self.width)?, self.length(a, "height", self.height)?);
        let r = self.length(a, "rx", self.width)?.min(w / 2.0).min(h / 2.0);
        if r == 0.0 {
            return self.paint(a, &format!("{x:.2} {y:.2} {w:.2} {h:.2} re"));
        }
        let mut path = format!("{:.2} {y:.2} m", x + r);
        // Sides, each with the corner behind it.
        let k = r * (1.0 - ARC);
        for (side, curve) in [
            ((x + w - r, y), [(x + w - k, y), (x + w, y + k), (x + w, y + r)]),
            ((x + w, y + h - r), [(x + w, y + h - k), (x + w - k, y + h), (x + w - r, y + h)]),
            ((x + r, y + h), [(x + k, y + h), (x, y + h - k), (x, y + h - r)]),
            ((x, y + r), [(x, y + k), (x + k, y), (x + r, y)]),
        ] {
            let _ = write!(path, " {:.2} {:.2} l", side.0, side.1);
            curve.iter().for_each(|(x, y)| {
                let _ = write!(path, " {x:.2} {y:.2}");
            });
            path += " c";
        }
        self.paint(a, &(path + " h"))
    }

    fn line(&mut self, a: &Attributes) -> Result<()> {
        let (x1, y1) = (self.length(a, "x1", self.width)?, self.length(a, "y1", self.height)?);
        let (x2, y2) = (self.length(a, "x2", self.width)?, self.length(a, "y2", self.height)?);
        let unfilled = with(a, "fill", "none");
        self.paint(&unfilled, &format!("{x1:.2} {y1:.2} m {x2:.2} {y2:.2} l"))
    }

    fn polyline(&mut self, a: &Attributes) -> Result<()> {
        let points = a.get("points").map_or("", String::as_str);
        let mut path = String::new();
        for (i, point) in points.split_whitespace().enumerate() {
            let (x, y) = point.split_once(',').ok_or_else(|| unknown(point))?;
            let finite = |t: &str| t.parse::<f64>().is_ok_and(f64::is_finite);
            if !finite(x) || !finite(y) {
                return Err(unknown(point));
            }
            let _ = write!(path, "{x} {y} {} ", if i == 0 { 'm' } else { 'l' });
        }
        if path.is_empty() { Ok(()) } else { self.paint(a, path.trim_end()) }
    }

    fn circle(&mut self, a: &Attributes) -> Result<()> {
        let (x, y) = (self.length(a, "cx", self.width)?, self.length(a, "cy", self.height)?);
        let r = self.length(a, "r", self.width)?;
        let k = r * ARC;
        let mut path = format!("{:.2} {y:.2} m", x + r);
        for [(ax, ay), (bx, by), (cx, cy)] in [
            [(r, k), (k, r), (0.0, r)],
            [(-k, r), (-r, k), (-r, 0.0)],
            [(-r, -k), (-k, -r), (0.0, -r)],
            [(k, -r), (r, -k), (r, 0.0)],
        ] {
            let places = [x + ax, y + ay, x + bx, y + by, x + cx, y + cy];
            places.iter().for_each(|p| {
                let _ = write!(path, " {p:.2}");
            });
            path += " c";
        }
        self.paint(a, &(path + " h"))
    }

    /// Parses straight lines: M, L, H, V and Z with absolute coordinates.
    fn path(&mut self, a: &Attributes) -> Result<()> {
        let text = a.get("d").map_or("", String::as_str);
        let (mut path, mut at) = (String::new(), (0.0, 0.0));
        let mut rest = text.trim();
        while let Some(command) = rest.chars().next() {
            let end = rest[1..].find(|c: char| c.is_ascii_alphabetic()).map_or(rest.len(), |i| i + 1);
            let numbers: Vec<f64> =
                rest[1..end].split([' ', ',']).filter_map(|n| n.trim().parse().ok()).collect();
            rest = rest[end..].trim_start();
            at = match (command, &numbers[..]) {
                ('M' | 'L', [x, y]) => (*x, *y),
                ('H', [x]) => (*x, at.1),
                ('V', [y]) => (at.0, *y),
                ('Z', []) => {
                    path += "h ";
                    continue;
                }
                _ => return Err(unknown(text)),
            };
            let _ = write!(path, "{:.2} {:.2} {} ", at.0, at.1, if command == 'M' { 'm' } else { 'l' });
        }
        self.paint(a, path.trim_end())
    }

    fn text(&mut self, a: &Attributes, text: &str) -> Result<()> {
        let size = a.get("font-size").and_then(|s| s.parse().ok()).unwrap_or(self.font_size);
        let ink = a.get("fill").or(self.ink.as_ref()).map_or("#000", String::as_str);
        let Some([r, g, b, alpha]) = colour(ink)? else { return Ok(()) };
        let runs = runs(text)?;
        let wide: f64 = runs.iter().map(|run| run.width(size)).sum();
        let shift = match a.get("text-anchor").map(String::as_str) {
            Some("middle") => -wide / 2.0,
            Some("end") => -wide,
            _ => 0.0,
        };
        let (x, y) = (self.length(a, "x", self.width)?, self.length(a, "y", self.height)?);
        // Unit vectors along the line and upwards across it.
        let (along, across, origin) = match a.get("transform") {
            None => ((1.0, 0.0), (0.0, -1.0), (x, y)),
            Some(t) => {
                let places: Vec<f64> = t
                    .strip_prefix("translate(")
                    .and_then(|t| t.strip_suffix(") rotate(-90)"))
                    .map(|t| t.split_whitespace().filter_map(|n| n.parse().ok()).collect())
                    .unwrap_or_default();
                let [x, y] = places[..] else { return Err(unknown(t)) };
                ((0.0, -1.0), (-1.0, 0.0), (x, y))
            }
        };
        let font = if a.get("font-weight").is_some_and(|w| w == "bold") { "F2" } else { "F1" };
        self.content += "q\n";
        self.opacity(alpha);
        let _ = writeln!(self.content, "BT {r:.3} {g:.3} {b:.3} rg");
        let mut at = shift;
        for run in runs {
            let rise = if run.raised { 0.35 * size } else { 0.0 };
            let (x, y) =
                (origin.0 + along.0 * at + across.0 * rise, origin.1 + along.1 * at + across.1 * rise);
            let _ = writeln!(
                self.content,
                "/{font} {:.2} Tf {} {} {} {} {x:.2} {y:.2} Tm <{}> Tj",
                run.size(size),
                along.0,
                along.1,
                across.0,
                across.1,
                hexadecimal(&run.codes),
            );
            at += run.width(size);
        }
        self.content += "ET\nQ\n";
        Ok(())
    }

    fn image(&mut self, a: &Attributes) -> Result<()> {
        let (x, y) = (self.length(a, "x", self.width)?, self.length(a, "y", self.height)?);
        let (w, h) = (self.length(a, "width", self.width)?, self.length(a, "height", self.height)?);
        let bytes = a.get("href").and_then(|h| h.strip_prefix("data:image/png;base64,")).and_then(unbase64);
        let image =
            bytes.as_deref().and_then(Image::from_png).ok_or_else(|| unknown("an image of another kind"))?;
        let _ = writeln!(
            self.content,
            "q {w:.2} 0 0 -{h:.2} {x:.2} {:.2} cm /I{} Do Q",
            y + h,
            self.images.len()
        );
        self.images.push(image);
        Ok(())
    }

    /// Assembles the objects of the file and the table of their offsets.
    fn file(self) -> Result<Vec<u8>> {
        if self.width <= 0.0 || self.height <= 0.0 {
            return Err(unknown("a picture without a size"));
        }
        let images: String = (0..self.images.len()).map(|i| format!("/I{i} {} 0 R ", 7 + i)).collect();
        let states: String = self
            .opacities
            .iter()
            .enumerate()
            .map(|(i, o)| format!("/G{i} << /ca {0:.3} /CA {0:.3} >> ", f64::from(*o) / 1000.0))
            .collect();
        let font = |name: &str| {
            format!("<< /Type /Font /Subtype /Type1 /BaseFont /{name} /Encoding /WinAnsiEncoding >>")
                .into_bytes()
        };
        let stream = |head: &str, data: &[u8]| {
            let mut object = format!("<< {head} /Length {} >>\nstream\n", data.len()).into_bytes();
            object.extend_from_slice(data);
            object.extend_from_slice(b"\nendstream");
            object
        };
        let mut objects = vec![
            b"<< /Type /Catalog /Pages 2 0 R >>".to_vec(),
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>".to_vec(),
            format!(
                "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {:.2} {:.2}] /Contents 4 0 R /Resources << /Font << /F1 5 0 R \
                 /F2 6 0 R >> /ExtGState << {states}>> /XObject << {images}>> >> >>",
                self.width * UNIT,
                self.height * UNIT
            )
            .into_bytes(),
            stream("", self.content.as_bytes()),
            font("Helvetica"),
            font("Helvetica-Bold"),
        ];
        for image in &self.images {
            let head = format!(
                "/Type /XObject /Subtype /Image /Width {w} /Height {h} /BitsPerComponent 8 /ColorSpace [/Indexed /DeviceRGB \
                 {last} <{palette}>] /Filter /FlateDecode /DecodeParms << /Predictor 15 /Colors 1 /BitsPerComponent 8 \
                 /Columns {w} >>",
                w = image.width,
                h = image.height,
                last = (image.palette.len() / 3).saturating_sub(1),
                palette = hexadecimal(&image.palette),
            );
            objects.push(stream(&head, &image.data));
        }
        let mut out = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n".to_vec();
        let mut places = Vec::new();
        for (i, object) in objects.iter().enumerate() {
            places.push(out.len());
            out.extend(format!("{} 0 obj\n", i + 1).bytes());
            out.extend_from_slice(object);
            out.extend_from_slice(b"\nendobj\n");
        }
        let table = out.len();
        let mut end = format!("xref\n0 {}\n0000000000 65535 f \n", objects.len() + 1);
        places.iter().for_each(|p| {
            let _ = writeln!(end, "{p:010} 00000 n ");
        });
        let size = objects.len() + 1;
        let _ = write!(end, "trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n");
        out.extend(end.bytes());
        Ok(out)
    }
}

/// Bézier handles of a quarter of a circle, over its radius.
const ARC: f64 = 0.552_284_75;

fn with(a: &Attributes, name: &str, value: &str) -> Attributes {
    let mut changed = a.clone();
    changed.insert(name.to_owned(), value.to_owned());
    changed
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Characters of the same style, as codes of the encoding.
struct TextRun {
    codes: Vec<u8>,
    raised: bool,
}

impl TextRun {
    fn size(&self, size: f64) -> f64 {
        if self.raised { 0.7 * size } else { size }
    }

    fn width(&self, size: f64) -> f64 {
        let of = |c: &u8| match c {
            32..=126 => WIDTHS[usize::from(c - 32)],
            // Most letters and signs beyond ASCII are about as wide as a digit.
            _ => 556,
        };
        self.codes.iter().map(|c| f64::from(of(c))).sum::<f64>() / 1000.0 * self.size(size)
    }
}

/// Encodes text as runs of the same style.
fn runs(text: &str) -> Result<Vec<TextRun>> {
    let mut runs: Vec<TextRun> = Vec::new();
    for c in text.chars().filter(|c| *c != '\n') {
        let (code, raised) = match c {
            '\u{20}'..='\u{7e}' | '\u{a0}'..='\u{ff}' => (c as u8, false),
            '⁻' => (b'-', true),
            'ᵀ' => (b'T', true),
            '⁰' => (b'0', true),
            '⁴'..='⁹' => (b'4' + (c as u32 - '⁴' as u32) as u8, true),
            '−' => (b'-', false),
            '–' => (0x96, false),
            '—' => (0x97, false),
            '‘' => (0x91, false),
            '’' => (0x92, false),
            '“' => (0x93, false),
            '”' => (0x94, false),
            '…' => (0x85, false),
            '•' => (0x95, false),
            other => return Err(unknown(&format!("the character {other}"))),
        };
        // Latin-1 has raised digits of its own; beside a raised sign they are set as it is.
        let after_raised = runs.last().is_some_and(|r: &TextRun| r.raised);
        let (code, raised) = match c {
            '¹' if after_raised => (b'1', true),
            '²' if after_raised => (b'2', true),
            '³' if after_raised => (b'3', true),
            _ => (code, raised),
        };
        match runs.last_mut() {
            Some(run) if run.raised == raised => run.codes.push(code),
            _ => runs.push(TextRun { codes: vec![code], raised }),
        }
    }
    Ok(runs)
}

fn unbase64(text: &str) -> Option<Vec<u8>> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    for part in text.trim_end_matches('=').as_bytes().chunks(4) {
        let mut word = 0u32;
        for &c in part {
            word = word << 6 | u32::from(value(c)?);
        }
        word <<= 6 * (4 - part.len() as u32);
        out.extend(&word.to_be_bytes()[1..part.len()]);
    }
    Some(out)
}

impl Image {
    /// Extracts the parts of a PNG of indexed colours with eight bits each.
    fn from_png(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let mut image = Self { width: word(16)?, height: word(20)?, palette: Vec::new(), data: Vec::new() };
        if bytes.get(24..26)? != [8, 3] {
            return None;
        }
        let mut at = 8;
        while at + 8 <= bytes.len() {
            let len = word(at)? as usize;
            let data = bytes.get(at + 8..at.checked_add(8)?.checked_add(len)?)?;
            match bytes.get(at + 4..at + 8)? {
                b"PLTE" => image.palette = data.to_vec(),
                b"IDAT" => image.data.extend_from_slice(data),
                _ => {}
            }
            at += 12 + len;
        }
        Some(image).filter(|i| !i.data.is_empty() && !i.palette.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Line, heat_image, lines};
    use attlas::diagnostics::HeatMap;

    fn content(svg: &str) -> String {
        String::from_utf8_lossy(&from_svg(svg).unwrap()).into_owned()
    }

    fn framed(body: &str) -> String {
        format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 200 100\">{body}</svg>\n")
    }

    #[test]
    fn the_table_names_the_place_of_every_object() {
        let points = vec![(1.0, 0.5), (2.0, 0.25)];
        let file = from_svg(&lines(
            "a & b",
            ["x", "y"],
            ("level", 0.3),
            &[Line { name: "one".into(), points, dashed: true }],
        ));
        let file = file.unwrap();
        let text = String::from_utf8_lossy(&file);
        assert!(text.starts_with("%PDF-1.4") && text.ends_with("%%EOF\n"));
        let start: usize =
            text.rsplit("startxref\n").next().unwrap().lines().next().unwrap().parse().unwrap();
        let table = String::from_utf8_lossy(&file[start..]).into_owned();
        let places: Vec<usize> =
            table.lines().filter(|l| l.ends_with(" n ")).map(|l| l[..10].parse().unwrap()).collect();
        assert_eq!(places.len(), 6);
        for (i, place) in places.iter().enumerate() {
            assert!(file[*place..].starts_with(format!("{} 0 obj", i + 1).as_bytes()), "object {i}");
        }
        // The title, without escapes.
        assert!(text.contains(&hexadecimal(b"a & b")));
        assert!(text.contains("[6 4] 0 d"), "dashes");
    }

    #[test]
    fn shapes_colours_and_text_are_where_they_belong() {
        let page = content(&framed(
            "<style>text{font:10px sans-serif;fill:#222}</style><rect width=\"100%\" height=\"50%\" fill=\"#f00\"/>\
             <line x1=\"1\" y1=\"2\" x2=\"3\" y2=\"4\" stroke=\"#0008\"/><text x=\"50\" y=\"20\" text-anchor=\"middle\">Z⁻¹A &lt; 1</text>\
             <text transform=\"translate(7 30) rotate(-90)\">up</text><circle cx=\"5\" cy=\"6\" r=\"2\" fill=\"hsl(120 100% 50%)\"/>\
             <path d=\"M1 2 V5 H9\" fill=\"none\" stroke=\"currentColor\"/><g><title>no &lt;b&gt;</title></g>",
        ));
        assert!(page.contains("/MediaBox [0 0 150.00 75.00]") && page.contains("0.75 0 0 -0.75 0 75.00 cm"));
        assert!(page.contains("1.000 0.000 0.000 rg\n0.00 0.00 200.00 50.00 re f"));
        assert!(page.contains("1.00 2.00 m 3.00 4.00 l S") && page.contains("/ca 0.533"));
        assert!(page.contains("0.000 1.000 0.000 rg"), "green");
        assert!(page.contains("1.00 2.00 m 1.00 5.00 l 9.00 5.00 l S"));
        // Z, then a raised -1, then the rest: 6.11, 0.7 · (3.33 + 5.56), and A < 1 wide.
        let width = 6.11 + 6.223 + (6.67 + 2.78 + 5.84 + 2.78 + 5.56);
        assert!(page.contains(&format!("Tf 1 0 0 -1 {:.2} 20.00 Tm <5a> Tj", 50.0 - width / 2.0)), "{page}");
        assert!(page.contains(&format!("16.50 Tm <{}> Tj", hexadecimal(b"-1"))), "raised by 3.5");
        assert!(page.contains("0 -1 -1 0 7.00 30.00 Tm"));
    }

    #[test]
    fn images_keep_their_pixels_and_what_is_unknown_is_an_error() {
        let map = HeatMap { rows: 2, cols: 3, data: vec![1.0, 0.1, 0.01, 0.001, 0.0, 1.0] };
        let file = from_svg(&framed(&heat_image(&map, 10.0, 20.0, 30.0, "title"))).unwrap();
        let text = String::from_utf8_lossy(&file);
        assert!(text.contains("q 30.00 0 0 -30.00 10.00 50.00 cm /I0 Do Q"));
        assert!(text.contains("/Width 3 /Height 2") && text.contains("/I0 7 0 R"));
        // Largest first, four decades in 64 shades.
        assert!(file.windows(8).any(|w| w == [0, 63, 47, 32, 0, 16, 0, 63]));
        for bad in ["<ellipse rx=\"1\"/>", "<text>日</text>", "<line stroke=\"red\"/>", "<image href=\"x\"/>"]
        {
            let error = from_svg(&framed(bad)).unwrap_err().to_string();
            assert!(error.contains("write .svg instead"), "{error}");
        }
        assert_eq!(unbase64("Zm9vYmE="), Some(b"fooba".to_vec()));
    }
}
