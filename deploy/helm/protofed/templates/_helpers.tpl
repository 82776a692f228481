{{- define "protofed.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 24 | trimSuffix "-" -}}
{{- end }}

{{- /* Labels that never change: root, component, and of a site its name. */ -}}
{{- define "protofed.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .site }}
site: {{ . }}
{{- end }}
{{- end }}

{{- define "protofed.labels" -}}
{{ include "protofed.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "protofed.image" -}}
{{- with .root.Values.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- /* host:port by which sites find the server. */ -}}
{{- define "protofed.serverAddress" -}}
{{- if .Values.serverAddress -}}
{{ .Values.serverAddress }}
{{- else if .Values.server.enabled -}}
{{ include "protofed.serverHost" . }}:{{ .Values.server.service.port | int }}
{{- else -}}
{{ fail "serverAddress: expected host:port of the server, since server.enabled is false" }}
{{- end -}}
{{- end }}

{{- define "protofed.serverHost" -}}
{{ include "protofed.fullname" . }}-server.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* What every pod has: nothing of the cluster's API, no variables of services (PROTOFED_SERVER_… would be taken for
settings), a user without rights. */ -}}
{{- define "protofed.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 60
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  {{- with .groups }}
  supplementalGroups:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "protofed.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* A Secret's files show as readable by the pod's group, and a daemon refuses a key that others can read: they are
copied, into memory, to files of the daemon's own. */ -}}
{{- define "protofed.identityCopy" -}}
- name: identity
  image: {{ .image }}
  imagePullPolicy: {{ .pullPolicy }}
  command:
    - sh
    - -ec
    - |
      install -m 0600 /secret/*.pem /identity/
      if [ -d /operators ]; then
        install -d -m 0700 /identity/operators
        install -m 0600 /operators/*.pem /identity/operators/
      fi
      if [ -d /notify ]; then
        install -d -m 0700 /identity/notify
        install -m 0600 /notify/* /identity/notify/
      fi
  {{- include "protofed.containerSecurity" . | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: identity, mountPath: /identity}
    {{- if .operators }}
    - {name: operators, mountPath: /operators, readOnly: true}
    {{- end }}
    {{- if .notify }}
    - {name: notify, mountPath: /notify, readOnly: true}
    {{- end }}
{{- end }}

{{- define "protofed.identityVolumes" -}}
- name: secret
  secret:
    secretName: {{ . }}
    defaultMode: 0400
    items:
      - {key: cert.pem, path: cert.pem}
      - {key: key.pem, path: key.pem}
      - {key: ca.pem, path: ca.pem}
- name: identity
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: tmp
  emptyDir: {}
{{- end }}

{{- /* It lives as long as it answers; it is ready when it can do its work. `starts`: tries of 5 s that a start may take. */ -}}
{{- define "protofed.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ . }}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{- define "protofed.stateClaim" -}}
- metadata:
    name: state
    labels:
      {{- include "protofed.selector" . | nindent 6 }}
  spec:
    accessModes: [{{ .state.accessMode }}]
    {{- with .state.storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .state.size }}
{{- end }}

{{- define "protofed.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
