// Renders a chart as `helm template` does, as far as this chart needs it: text/template, sprig and Helm's own functions.
//
// Standard input: JSON {"chart": folder, "values": …, "release": name, "namespace": name}; standard output: JSON {path: text}.
// It is built from Debian's packages, without a network: GO111MODULE=off GOPATH=/usr/share/gocode go build.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type asked struct {
	Chart     string                 `json:"chart"`
	Values    map[string]interface{} `json:"values"`
	Release   string                 `json:"release"`
	Namespace string                 `json:"namespace"`
}

// files are those of the chart that are no templates, as .Files.
type files map[string]string

func (f files) Get(name string) string { return f[name] }

func (f files) Glob(pattern string) files {
	found := files{}
	for name, text := range f {
		if matches, _ := filepath.Match(pattern, name); matches {
			found[name] = text
		}
	}
	return found
}

func main() {
	var said asked
	if err := json.NewDecoder(os.Stdin).Decode(&said); err != nil {
		end(err)
	}
	rendered, err := render(said)
	if err != nil {
		end(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(rendered); err != nil {
		end(err)
	}
}

func end(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func render(said asked) (map[string]string, error) {
	root := template.New("chart").Option("missingkey=zero")
	root.Funcs(functions(root))
	var names []string
	for path, text := range read(said.Chart, "templates") {
		if _, err := root.New(path).Parse(text); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(filepath.Base(path), "_") {
			names = append(names, path)
		}
	}
	top, err := context(said)
	if err != nil {
		return nil, err
	}
	rendered := map[string]string{}
	for _, name := range names {
		var text bytes.Buffer
		if err := root.ExecuteTemplate(&text, name, top); err != nil {
			return nil, err
		}
		// As Helm does: what is missing is an empty text.
		rendered[name] = strings.ReplaceAll(text.String(), "<no value>", "")
	}
	return rendered, nil
}

func context(said asked) (map[string]interface{}, error) {
	var chart map[string]interface{}
	text, err := os.ReadFile(filepath.Join(said.Chart, "Chart.yaml"))
	if err == nil {
		err = yaml.Unmarshal(text, &chart)
	}
	named := map[string]interface{}{"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]}
	release := map[string]interface{}{"Name": said.Release, "Namespace": said.Namespace, "Service": "Helm"}
	return map[string]interface{}{
		"Values": said.Values, "Chart": named, "Release": release, "Files": read(said.Chart, "rules"),
	}, err
}

func functions(root *template.Template) template.FuncMap {
	known := sprig.TxtFuncMap()
	delete(known, "env") // Helm has neither
	delete(known, "expandenv")
	known["include"] = func(name string, data interface{}) (string, error) {
		var text bytes.Buffer
		err := root.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	known["toYaml"] = func(value interface{}) (string, error) {
		var text bytes.Buffer
		encoder := yaml.NewEncoder(&text)
		encoder.SetIndent(2)
		err := encoder.Encode(value)
		return strings.TrimSuffix(text.String(), "\n"), err
	}
	known["fromYaml"] = func(text string) (map[string]interface{}, error) {
		value := map[string]interface{}{}
		err := yaml.Unmarshal([]byte(text), &value)
		return value, err
	}
	known["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return value, errors.New(message)
		}
		return value, nil
	}
	return known
}

// read finds the texts below a folder of the chart, by their paths in it; also behind symbolic links.
func read(chart string, folder string) files {
	found := files{}
	entries, _ := os.ReadDir(filepath.Join(chart, folder))
	for _, entry := range entries {
		path := filepath.Join(folder, entry.Name())
		if text, err := os.ReadFile(filepath.Join(chart, path)); err == nil {
			found[path] = string(text)
		}
	}
	return found
}
