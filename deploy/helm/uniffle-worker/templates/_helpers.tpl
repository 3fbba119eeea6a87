{{/* Name of all objects: that of the release, which also names pods and so the workers. */}}
{{- define "worker.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "worker.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "worker.labels" -}}
{{ include "worker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* HOST:PORT of the coordinators, as a TOML array. */}}
{{- define "worker.quorum" -}}
{{- $quorum := list -}}
{{- $name := include "worker.name" . -}}
{{- if .Values.embeddedCoordinator.enabled -}}
{{- range $replica := until (int (min 3 (int .Values.replicas))) }}{{ $quorum = append $quorum (printf "\"%s-%d.%s:21100\"" $name $replica $name) }}{{ end -}}
{{- else -}}
{{- range .Values.coordinators }}{{ $quorum = append $quorum (quote .) }}{{ end -}}
{{- end -}}
[{{ join ", " $quorum }}]
{{- end -}}

{{/* Lines of a value at the indentation of config.toml. */}}
{{- define "worker.lines" -}}
{{- with . }}
{{ . | trim | indent 4 }}
{{- end }}
{{- end -}}

{{- define "worker.ports" -}}
- name: grpc
  port: 21100
- name: tcp
  port: 21200
- name: http
  port: 19998
{{- end -}}
