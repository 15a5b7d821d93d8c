//! All methods, layers and conversions in one picture, drawn from the registry.

use attlas::method::Family;
use attlas::registry;
use std::fmt::Write;

const WIDTH: usize = 150;
const GAP: usize = 14;
const LINE: usize = 17;
const TOP: usize = 78;

/// A column of the picture: its title, the text below, its colour and its ids.
struct Column {
    title: &'static str,
    words: &'static str,
    colour: &'static str,
    ids: Vec<&'static str>,
}

fn columns() -> Vec<Column> {
    let family = |family: Family| -> Vec<&'static str> {
        registry::METHODS.iter().filter(|m| m.family == family).map(|m| m.id).collect()
    };
    vec![
        Column { title: "Exact", words: "and yardsticks", colour: "#4d4d4d", ids: family(Family::Exact) },
        Column {
            title: "Clustering",
            words: "and sampling",
            colour: "#0072b2",
            ids: family(Family::Clustering),
        },
        Column {
            title: "Low rank",
            words: "landmarks, coresets",
            colour: "#009e73",
            ids: family(Family::LowRank),
        },
        Column {
            title: "Kernel",
            words: "features, sketches",
            colour: "#d55e00",
            ids: family(Family::Kernel),
        },
        Column {
            title: "Layers",
            words: "latent and tensor",
            colour: "#6a51a3",
            ids: registry::LAYERS.iter().map(|l| l.id).collect(),
        },
        Column {
            title: "Conversions",
            words: "of trained weights",
            colour: "#a6611a",
            ids: registry::CONVERSIONS.iter().map(|c| c.id).collect(),
        },
    ]
}

/// Draws the picture as SVG.
pub fn svg() -> String {
    let columns = columns();
    let rows = columns.iter().map(|c| c.ids.len()).max().unwrap_or(0);
    let (width, height) = (columns.len() * (WIDTH + GAP) + GAP, TOP + rows * LINE + 24);
    let middle = width / 2;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         role=\"img\" aria-label=\"Methods, layers and conversions by family\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"{middle}\" y=\"18\" text-anchor=\"middle\" font-size=\"15\" font-weight=\"bold\" fill=\"#222222\">Attention</text>\n"
    );
    for (c, column) in columns.iter().enumerate() {
        let x = GAP + c * (WIDTH + GAP);
        let (centre, colour, boxed) = (x + WIDTH / 2, column.colour, column.ids.len() * LINE + 10);
        let _ = write!(
            out,
            "<path d=\"M{middle} 23 V28 H{centre} V34\" fill=\"none\" stroke=\"#999999\"/>\n\
             <rect x=\"{x}\" y=\"34\" width=\"{WIDTH}\" height=\"36\" rx=\"4\" fill=\"{colour}\"/>\n\
             <text x=\"{centre}\" y=\"49\" text-anchor=\"middle\" font-size=\"13\" font-weight=\"bold\" fill=\"#ffffff\">{}</text>\n\
             <text x=\"{centre}\" y=\"63\" text-anchor=\"middle\" font-size=\"10\" fill=\"#ffffff\">{}</text>\n\
             <rect x=\"{x}\" y=\"{TOP}\" width=\"{WIDTH}\" height=\"{boxed}\" rx=\"4\" fill=\"none\" stroke=\"{colour}\"/>\n",
            column.title, column.words,
        );
        for (row, id) in column.ids.iter().enumerate() {
            let y = TOP + 16 + row * LINE;
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{y}\" font-size=\"12\" fill=\"#222222\">{id}</text>",
                x + 10
            );
        }
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_of_the_registry_is_in_the_picture() {
        let picture = svg();
        let methods = registry::METHODS.iter().map(|m| m.id);
        let layers = registry::LAYERS.iter().map(|l| l.id);
        for id in methods.chain(layers).chain(registry::CONVERSIONS.iter().map(|c| c.id)) {
            assert!(picture.contains(&format!(">{id}</text>")), "{id}");
        }
    }

    #[test]
    fn the_picture_of_the_readme_is_that_of_the_registry() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/img/taxonomy.svg");
        let stored = std::fs::read_to_string(path).unwrap_or_default();
        assert!(stored == svg(), "run `attlas methods --svg docs/img/taxonomy.svg`");
    }
}
